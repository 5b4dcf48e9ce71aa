"""The cache façade: the core, the pool and the copy workers behind one object, for the event loop only.

`Cache.handle(stimulus)` decides in the core and performs at once: no `await` lies between the two.
"""

from kvtierd.cache.clearing import Cleared
from kvtierd.cache.disks import DiskFile
from kvtierd.cache.facade import Cache, Event, Listener
from kvtierd.cache.snapshot import DiskSnapshot, SessionAbout, Snapshot
from kvtierd.cache.waiters import WAITS_PER_EPOCH_MAX
from kvtierd.workers.channel.channel import PacketChannel
from kvtierd.workers.supervisor.supervisor import CPU, DeviceRange, GroupMapping

__all__ = [
    "CPU",
    "WAITS_PER_EPOCH_MAX",
    "Cache",
    "Cleared",
    "DeviceRange",
    "DiskFile",
    "DiskSnapshot",
    "Event",
    "GroupMapping",
    "Listener",
    "PacketChannel",
    "SessionAbout",
    "Snapshot",
]
