"""Calls of Admin, by whoever."""

from typing import Any

import grpc
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc
from kvtierd.rpc.contract import TOKEN_METADATA

from tests.integration.daemon.raw import RawSession
from tests.support.process import DEADLINE_S, Daemon

STREAMS = ("Drain", "Record")


class Caller:
    """Somebody who calls Admin, with the token of a session or without one."""

    def __init__(self, daemon: Daemon, session: RawSession | None) -> None:
        self._channel = grpc.insecure_channel(f"unix:{daemon.socket}")
        self.stub = admin_pb2_grpc.AdminStub(self._channel)
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        if session is not None:
            session.token = session.token or session.side.open()
            self._metadata = ((TOKEN_METADATA, session.token),)

    def call(self, name: str, request: Any) -> Any:
        answer = getattr(self.stub, name)(request, timeout=DEADLINE_S, metadata=self._metadata)
        return list(answer) if name in STREAMS else answer

    def refused(self, name: str, request: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as error:
            self.call(name, request)
        return error.value.code()

    def status(self) -> admin_pb2.StatusResponse:
        answer: admin_pb2.StatusResponse = self.call("Status", admin_pb2.StatusRequest())
        return answer

    def namespaces(self) -> list[admin_pb2.NamespaceStatus]:
        return list(self.call("ListNamespaces", admin_pb2.ListNamespacesRequest()).namespaces)

    def explain(self, key: bytes) -> list[admin_pb2.Explanation]:
        return list(self.call("Explain", admin_pb2.ExplainRequest(hash=key)).explanations)

    def close(self) -> None:
        self._channel.close()
