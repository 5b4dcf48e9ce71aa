"""A router: it asks several hosts how much of a prompt each of them has in its cache, and chooses the one
with the longest prefix.

    python prefix_router.py HOST:PORT HOST:PORT --certificate router.pem --key router.key --ca ca.pem \\
        --model MODEL < hashes

On standard input are the prompt's block hashes in hexadecimal, one a line, as `python -m kvtier_vllm.hashes`
prints them. Each daemon has to listen (`remote.listen`), and a rule in its `server.tenants` has to say whose
blocks this certificate may see. Nothing is held for the router: the engine's own lookup decides.
"""

import argparse
import sys
from pathlib import Path

import grpc
from kvtier.v1 import admin_pb2, remote_pb2, remote_pb2_grpc

TIMEOUT_S = 1.0
"""A host that takes longer to answer counts as one that has nothing."""
HASHES_MAX = 8_192


def blocks_at(stub, model, hashes):
    """How many of a prompt's first blocks the daemon has, in memory or on a disk. Engines of several groups
    need every one of them, so the shortest run counts."""
    listed = stub.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=TIMEOUT_S)
    runs = {}
    for each in listed.namespaces:
        if each.model == model:
            asked = remote_pb2.FindRequest(
                namespace_digest=each.namespace_digest, group=each.group, hashes=hashes
            )
            found = stub.Find(asked, timeout=TIMEOUT_S).leading_blocks
            runs[each.namespace_digest] = min(runs.get(each.namespace_digest, found), found)
    return max(runs.values(), default=0)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("hosts", nargs="+", metavar="HOST:PORT")
    for name in ("certificate", "key", "ca"):
        options.add_argument(f"--{name}", type=Path, required=True)
    options.add_argument("--model", required=True)
    given = options.parse_args()
    hashes = b"".join(bytes.fromhex(line) for line in sys.stdin.read().split()[:HASHES_MAX])
    credentials = grpc.ssl_channel_credentials(
        given.ca.read_bytes(), given.key.read_bytes(), given.certificate.read_bytes()
    )
    longest = {}
    for host in given.hosts:
        with grpc.secure_channel(host, credentials) as channel:
            try:
                longest[host] = blocks_at(remote_pb2_grpc.RemoteStub(channel), given.model, hashes)
            except grpc.RpcError as error:
                print(f"{host} is left out: {error.details()}", file=sys.stderr)
                longest[host] = 0
        print(f"{host} has {longest[host]} blocks")
    print(f"send the request to {max(longest, key=longest.get)}")


if __name__ == "__main__":
    main()
