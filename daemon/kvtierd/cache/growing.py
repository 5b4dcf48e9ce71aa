"""How a pool that serves gets the rest of its memory: from a process, whose progress the core is told."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

from kvtierd.cache.facade import Cache
from kvtierd.logs import logger
from kvtierd.memory.host_pool import HostPool
from kvtierd.memory.pool_file import AREA_BYTES, file_bytes, gib, populated_bytes
from kvtierd.workers.signals import held_back

PROGRAM = "kvtierd.memory.populate_rest"

log = logger(__name__)


async def grow(cache: Cache, pool: HostPool) -> None:
    """Gets memory for the rest of the pool, and hands each area to the core as soon as it has its own. If
    there is no memory for more, the pool stays as large as it is until the daemon starts again. Runs until it
    is cancelled."""
    start = populated_bytes(pool.geometry, pool.populated_extents)
    end = file_bytes(pool.geometry)
    if start < end:
        try:
            why = await _populate(cache, pool, start, end)
        except OSError as error:  # the process could not be started
            why = str(error)
        if pool.populated_extents < pool.geometry.extents:
            cache.pool_stays(why)
        else:
            log.info("the whole pool has memory", size=gib(end))
    await asyncio.Event().wait()


async def _populate(cache: Cache, pool: HostPool, start: int, end: int) -> str:
    """Returns how the process ended, in words."""
    process = _start(pool.fd, start, end, max(AREA_BYTES, pool.geometry.extent_bytes))
    assert process.stdout is not None
    assert process.stderr is not None
    reader = asyncio.StreamReader()
    try:
        with process.stderr:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), process.stdout
            )
            with contextlib.closing(transport):
                while line := await reader.readline():
                    cache.pool_populated(int(line))
                status = await asyncio.to_thread(process.wait)
                said = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    finally:
        # Until it is gone, it holds the pool's lock, and gives the pool memory.
        process.kill()
        process.wait()
    if status < 0:
        return f"the process that asks for it was killed by {signal.Signals(-status).name}"
    return said or f"the process that asks for it exited with status {status}"


def _start(pool_fd: int, start: int, end: int, area_bytes: int) -> "subprocess.Popen[bytes]":
    arguments = {
        "--daemon-pid": os.getpid(),
        "--pool-fd": pool_fd,
        "--start": start,
        "--end": end,
        "--area-bytes": area_bytes,
    }
    # -P: nothing in the working directory can shadow a module.
    command = [sys.executable, "-P", "-m", PROGRAM]
    for name, value in arguments.items():
        command += [name, str(value)]
    with held_back():  # it never lets these signals through: whoever stops the daemon stops it, too
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(pool_fd,),
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
