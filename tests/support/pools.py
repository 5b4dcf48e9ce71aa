"""Pools for tests that need more than the first area of one, without a daemon that gets its memory."""

from kvtierd.memory.host_pool import HostPool
from kvtierd.memory.populating import populate_range


def whole(pool: HostPool) -> HostPool:
    """Gets memory for all of a pool, in this process. Returns it."""
    populate_range(pool.fd, pool.array, 0, threads=2)
    pool.populated(len(pool.array))
    return pool
