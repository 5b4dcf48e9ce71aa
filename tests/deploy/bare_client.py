"""What a user's first program does, with what the wheel brings: stores, looks up, loads, compares.

    python -I bare_client.py SOCKET NAME

Prints one JSON object. Imports nothing of the repository.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import kvtier
import numpy as np

BLOCKS = 32
BLOCK_BYTES = 64 * 1024
WAIT_S = 60.0


def ask(client: kvtier.Client, hashes: list[bytes], *, lease: bool = False) -> kvtier.Lookup:
    """What the daemon says, however long it takes it: to an engine one that is late is a miss."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := client.lookup(hashes, lease=lease, timeout_s=WAIT_S)).answered:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)
    return found


def ended(submit: Callable[[], kvtier.Transfer]) -> kvtier.Outcome:
    """How a transfer ends that is submitted again while the daemon is too late to be given one."""
    deadline_s = time.monotonic() + WAIT_S
    while (outcome := submit().wait(WAIT_S)).throttled:
        assert time.monotonic() < deadline_s, outcome
        time.sleep(0.01)
    return outcome


def main(socket: str, name: str) -> None:
    memory = kvtier.SharedBuffer.create(2 * BLOCKS * BLOCK_BYTES)
    blocks = memory.array.reshape(2 * BLOCKS, BLOCK_BYTES)
    blocks[:BLOCKS] = np.random.default_rng(7).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
    hashes = [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(BLOCKS)]
    group = kvtier.Group(
        block_tokens=16,
        num_blocks=2 * BLOCKS,
        planes=(kvtier.Plane(fragment_bytes=BLOCK_BYTES, base_offset=0, block_stride_bytes=BLOCK_BYTES),),
    )
    client = kvtier.Client(
        instance=name,
        namespace=kvtier.Namespace(model=f"bare/{name}", kv_dtype="uint8", hash_scheme="sha256"),
        groups=[group],
        memory=memory,
        socket=socket,
    )
    assert client.wait_ready(WAIT_S), client.status
    before = ask(client, hashes).hits
    stored = ended(lambda: client.store(hashes, range(BLOCKS)))
    assert stored.done, stored
    found = ask(client, hashes, lease=True)
    loaded = ended(lambda: client.load(found, range(BLOCKS, BLOCKS + found.hits)))
    assert loaded.done, loaded
    same = int((blocks[BLOCKS:] == blocks[:BLOCKS]).all(axis=1).sum())
    assert client.close()
    loaded_modules = {each.partition(".")[0] for each in sys.modules}
    print(
        json.dumps(
            {
                "hits_before": before,
                "hits": found.hits,
                "same": same,
                "from": kvtier.__file__,
                "heavy": sorted(loaded_modules & {"torch", "vllm", "kvtierd", "uvloop", "click"}),
                "versions": {each: version(each) for each in ("kvtier", "grpcio", "protobuf", "numpy")},
            }
        )
    )


main(*sys.argv[1:])
