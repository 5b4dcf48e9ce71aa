"""A front to be killed: `python front.py POOL WORDS_FD FAULT memfd FD`, or `… FAULT GPU-… BYTES HANDLE
BUFFER_ID`.

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
from kvtierd.memory.host_pool import HostPool
from kvtierd.wire.worker_pb2 import DeviceRange
from kvtierd.workers.supervisor.handles import CPU

from tests.integration.worker.devices import Foreign, Memfd, RankMemory
from tests.integration.worker.rig import Client, Layout, Rig, until


async def main(pool: Path, words_fd: int, fault: str, device: str, cache: RankMemory) -> None:
    rig = Rig(HostPool.open(pool, 66 << 20, 16 << 20, lock_timeout_s=1), device=device)
    await rig.start(fault)
    client = Client(SessionId(1), Layout(), cache, words_fd)
    await rig.map(client)
    slots = rig.open(2, client.layout.slot_bytes)
    _, ticket = rig.post(client, Direction.STORE, [0], slots[:1])
    rig.post(client, Direction.LOAD, [1], slots[1:], gate=(0, 1))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    print(rig.pid, flush=True)
    await asyncio.Event().wait()


def of_test(device: str, *arguments: str) -> tuple[str, RankMemory]:
    """The device and the memory that the arguments name."""
    if device == "memfd":
        os.set_inheritable(int(arguments[0]), False)
        return CPU, Memfd(Layout().mapping_bytes, int(arguments[0]))
    size, handle, buffer_id = arguments
    return device, Foreign(
        DeviceRange(bytes=int(size), offset=0, ipc_handle=bytes.fromhex(handle), buffer_id=int(buffer_id))
    )


if __name__ == "__main__":
    words = int(sys.argv[2])
    os.set_inheritable(words, False)
    asyncio.run(main(Path(sys.argv[1]), words, sys.argv[3], *of_test(*sys.argv[4:])))
