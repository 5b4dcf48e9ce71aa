"""A front to be killed: `python front.py POOL WORDS_FD MEMORY_FD FAULT`.

Has its worker map the memory of the test that started it, posts a store (ticket 1) and a gated load (ticket
2), says the worker's pid once the store has started, and then does nothing more.
"""

import asyncio
import os
import sys
from pathlib import Path

from kvtier_kernels import PART_STARTED
from kvtierd.core.actions import Direction
from kvtierd.core.ids import SessionId
from kvtierd.memory import HostPool

from tests.integration.worker.rig import Client, Layout, Rig, until


async def main(pool: Path, words_fd: int, memory_fd: int, fault: str) -> None:
    rig = Rig(HostPool.open(pool, 66 << 20, 16 << 20, lock_timeout_s=1))
    await rig.start(fault)
    client = Client(SessionId(1), Layout(), words_fd, memory_fd)
    await rig.map(client)
    slots = rig.open(2, client.layout.slot_bytes)
    _, ticket = rig.post(client, Direction.STORE, [0], slots[:1])
    rig.post(client, Direction.LOAD, [1], slots[1:], gate=(0, 1))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    print(rig.supervisor.workers[rig.worker].pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    words, memory = int(sys.argv[2]), int(sys.argv[3])
    for fd in (words, memory):
        os.set_inheritable(fd, False)
    asyncio.run(main(Path(sys.argv[1]), words, memory, sys.argv[4]))
