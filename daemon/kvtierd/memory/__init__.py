"""The host pool: one shared file that outlives the daemon, and the decision what to keep of it after a
restart."""

from kvtierd.memory.errors import PoolError, PoolLocked, PoolRefused, PoolTooLarge
from kvtierd.memory.host_pool import HostPool, PoolStart
from kvtierd.memory.index_page import SharedPage

__all__ = ["HostPool", "PoolError", "PoolLocked", "PoolRefused", "PoolStart", "PoolTooLarge", "SharedPage"]
