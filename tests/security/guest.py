"""An engine of somebody else's, in whatever namespaces it was started in. It does what it is told line by
line on its standard input, and answers each line with one of JSON.

    python -m tests.security.guest SOCKET INSTANCE
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.v1 import types_pb2

from tests.integration.daemon.raw import RawSession
from tests.support.plain_client import PlainClient, block_hashes

BLOCKS = 16


class Guest:
    def __init__(self, socket: Path, instance: str) -> None:
        self._socket = socket
        self._instance = instance
        self._engine: PlainClient | None = None
        self._raw: list[RawSession] = []

    def who(self) -> dict[str, Any]:
        """Whom it takes itself for."""
        return {"uid": os.getuid(), "pid": os.getpid()}

    def attach(self) -> dict[str, Any]:
        """A stock client attaches, with memory of its own."""
        self._engine = PlainClient(self._socket, self._instance).ready()
        return {}

    def store(self, name: str) -> dict[str, Any]:
        assert self._engine is not None
        return {"done": self._engine.store(block_hashes(name, range(BLOCKS))).done}

    def load(self, name: str) -> dict[str, Any]:
        """How many of these blocks could be loaded; every byte of them was right."""
        assert self._engine is not None
        return {"loaded": self._engine.load(block_hashes(name, range(BLOCKS)))}

    def seat(self, instance: str) -> dict[str, Any]:
        """Tries to take the scheduler's seat of an instance."""
        raw = RawSession(self._socket)
        self._raw.append(raw)
        return {"epoch": raw.attach(instance=instance, role=types_pb2.ROLE_SCHEDULER, groups=[]).epoch}


def main(socket: str, instance: str) -> None:
    guest = Guest(Path(socket), instance)
    for line in sys.stdin:
        name, *arguments = line.split()
        order: Callable[..., dict[str, Any]] = getattr(guest, name)
        print(json.dumps(order(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
