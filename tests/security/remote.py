"""A daemon with a port for other hosts, its authority, and clients with certificates."""

import contextlib
from pathlib import Path
from typing import Any

import grpc
from kvtier.v1 import admin_pb2, remote_pb2, remote_pb2_grpc

from tests.security.conftest import Start
from tests.security.people import ATTACKER, VICTIM
from tests.support.certificates import HOST, CertificateAuthority, CertificateFolder, Issued, channel_to
from tests.support.process import DEADLINE_S, Daemon

ROUTER = "spiffe://tests/router"
RULES = f"cert:{ROUTER}=uid:{VICTIM},cert:spy.tests=uid:{ATTACKER}"
FOUND = grpc.StatusCode.OK
NOT_LET_IN = grpc.StatusCode.UNAVAILABLE


class Remote:
    """A daemon with a remote port, its authority and its clients."""

    def __init__(self, start: Start, folder: Path, **settings: Any) -> None:
        self.authority = CertificateAuthority()
        self.files = CertificateFolder(folder)
        self.own = self.authority.issue("kvtierd", dns=(HOST,))
        self.files.put(self.own, self.authority.pem)
        options = {"remote__listen": "127.0.0.1:0", "server__tenants": RULES} | self.files.settings
        self.daemon: Daemon = start(**(options | settings))
        self.port = port_of(self.daemon)
        self.router_name = ROUTER
        self.router = self.authority.issue("anything", uris=(ROUTER,))

    def as_client(self, own: Issued | None, trusted: bytes | None = None) -> "RemoteClient":
        return RemoteClient(channel_to(self.port, trusted or self.authority.pem, own))

    def status_for(self, own: Issued | None) -> grpc.StatusCode:
        """How a new connection of this client fares."""
        with contextlib.closing(self.as_client(own)) as client:
            return client.outcome()


class RemoteClient:
    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.stub = remote_pb2_grpc.RemoteStub(channel)

    def outcome(self) -> grpc.StatusCode:
        try:
            self.stub.Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return error.code()
        return FOUND

    def namespaces(self) -> list[admin_pb2.NamespaceStatus]:
        request = admin_pb2.ListNamespacesRequest()
        return list(self.stub.ListNamespaces(request, timeout=DEADLINE_S).namespaces)

    def find(self, digest: str, keys: bytes, **fields: Any) -> remote_pb2.FindResponse:
        request = remote_pb2.FindRequest(namespace_digest=digest, hashes=keys, **fields)
        return self.stub.Find(request, timeout=DEADLINE_S)

    def close(self) -> None:
        self.channel.close()


def port_of(daemon: Daemon) -> int:
    line = next(line for line in daemon.greeting.splitlines() if line.startswith("  remote "))
    return int(line.split()[1].rpartition(":")[2].rstrip(","))
