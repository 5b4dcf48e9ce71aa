"""Another process that uses the same fake machine, told what to do call by call; it can be killed."""

from __future__ import annotations

import array
import json
import os
import select
import socket
import subprocess
import sys
from typing import Any

from tests.support.fake_cuda import FakeCuda, environment_of
from tests.unit.fake_cuda.raw import Failed, Raw

DEADLINE_S = 60.0
MESSAGE_BYTES = 1 << 20


class Peer:
    """`peer.do("alloc", 4096)` is `Raw.alloc(4096)` over there: its result, or Failed."""

    def __init__(self, fake: FakeCuda, start: bool = True, **settings: object) -> None:
        """`settings`: of this process alone. `start` makes a context."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.fake_cuda.peer", str(theirs.fileno())],
                env=environment_of(fake, **settings),
                pass_fds=[theirs.fileno()],
            )
        self.pid = self.process.pid
        if start:
            try:
                self.do("start")
            except BaseException:
                self.end()
                raise

    def tell(self, method: str, *arguments: Any) -> None:
        """Begins it; the answer is left to `answer`."""
        encoded = [{"hex": one.hex()} if isinstance(one, bytes) else one for one in arguments]
        self._socket.send(json.dumps([method, encoded]).encode())

    @property
    def has_answered(self) -> bool:
        """Whether `answer` returns at once."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def answer(self) -> Any:
        data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 8)
        assert data, "the other process is dead"
        reply = json.loads(data)
        if "code" in reply:
            raise Failed(reply["failed"], reply["code"])
        if descriptors:
            return descriptors[0]
        result = reply["result"]
        return bytes.fromhex(result["hex"]) if isinstance(result, dict) else result

    def do(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL; not waited for, so that it is a zombie for a while."""
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._socket.close()


def main(ours: socket.socket) -> None:
    raw = Raw(os.environ["KVTIER_CUDA_LIBRARY"])
    while data := ours.recv(MESSAGE_BYTES):
        method, encoded = json.loads(data)
        arguments = [bytes.fromhex(one["hex"]) if isinstance(one, dict) else one for one in encoded]
        descriptors: list[int] = []
        try:
            result = getattr(raw, method)(*arguments)
        except Failed as failure:
            reply = {"failed": str(failure), "code": failure.code}
        else:
            if method == "export_chunk":
                descriptors = [result]
            if isinstance(result, bytes):
                result = {"hex": result.hex()}
            reply = {"result": None if isinstance(result, Raw) else result}
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        ours.sendmsg([json.dumps(reply).encode()], fds)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
