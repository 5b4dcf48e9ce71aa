"""An engine's process, as far as its GPU memory goes: `python -m tests.unit.transfer.gpu.exporter SOCKET_FD`.

Does what `Engine` asks for over the socket, one request at a time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kvtier_kernels.cuda import load

from tests.support.fake_cuda import FakeCuda, environment_of

REPO = Path(__file__).parents[4]
DEADLINE_S = 60


@dataclass(frozen=True)
class Exported:
    """An allocation of cuMemAlloc."""

    address: int
    handle: bytes
    buffer_id: int


class Engine:
    """The test's end of such a process."""

    def __init__(self, fake: FakeCuda, ordinal: int = 0) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.unit.transfer.gpu.exporter",
                    str(theirs.fileno()),
                    str(ordinal),
                ],
                pass_fds=[theirs.fileno()],
                env=environment_of(fake),
                cwd=REPO,
            )

    def alloc(self, size_bytes: int, seed: int = 0) -> Exported:
        """Memory filled with the bytes of `content(size_bytes, seed)`."""
        answer, _ = self._ask("alloc", size_bytes, seed)
        return Exported(answer["address"], bytes.fromhex(answer["handle"]), answer["buffer_id"])

    def free(self, memory: Exported) -> None:
        self._ask("free", memory.address)

    def chunk(self, size_bytes: int, seed: int = 0) -> int:
        """The descriptor of a chunk with such bytes; the caller closes it."""
        _, fds = self._ask("chunk", size_bytes, seed)
        return fds[0]

    def close(self) -> None:
        self._socket.close()
        self.process.wait(DEADLINE_S)

    def _ask(self, *request: object) -> tuple[Any, list[int]]:
        self._socket.send(json.dumps(request).encode())
        answer, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        assert answer, "the engine's process has died"
        return json.loads(answer), fds


def content(size_bytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def main(fd: int, ordinal: int) -> None:
    faulthandler.dump_traceback_later(2 * DEADLINE_S, exit=True)
    driver = load()
    driver.retain_primary(ordinal).make_current()
    with socket.socket(fileno=fd) as requests:
        while request := requests.recv(1 << 16):
            match json.loads(request):
                case ["alloc", size_bytes, seed]:
                    address = driver.alloc(size_bytes)
                    FakeCuda.view(address, size_bytes)[:] = content(size_bytes, seed)
                    handle = driver.ipc_export(address).hex()
                    buffer_id = driver.pointer_info(address).buffer_id
                    answer = {"address": address, "handle": handle, "buffer_id": buffer_id}
                    requests.send(json.dumps(answer).encode())
                case ["free", address]:
                    driver.free(address)
                    requests.send(b"{}")
                case ["chunk", size_bytes, seed]:
                    chunk = driver.chunk_create(size_bytes, ordinal)
                    address = driver.reserve(size_bytes)
                    driver.map_chunk(address, size_bytes, chunk)
                    driver.allow_access(address, size_bytes, ordinal)
                    FakeCuda.view(address, size_bytes)[:] = content(size_bytes, seed)
                    exported = driver.chunk_export(chunk)
                    socket.send_fds(requests, [b"{}"], [exported])
                    os.close(exported)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
