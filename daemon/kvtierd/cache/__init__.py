"""The cache façade: the core, the pool and the copy workers behind one object, for the event loop only.

`Cache.handle(stimulus)` decides in the core and performs at once: no `await` lies between the two.
"""

from kvtierd.cache.clearing import Cleared
from kvtierd.cache.disks import DiskFile
from kvtierd.cache.facade import Cache, Event, Listener, Teller
from kvtierd.cache.growing import grow
from kvtierd.cache.learning import LearntFile
from kvtierd.cache.snapshot import DiskSnapshot, EventsSnapshot, SessionAbout, Snapshot
from kvtierd.cache.ticks import run_ticks
from kvtierd.cache.waiters import WAITS_PER_EPOCH_MAX
from kvtierd.wire.worker_pb2 import DeviceRange, MappedGroup
from kvtierd.workers.channel.packets import PacketChannel
from kvtierd.workers.supervisor.handles import CPU

__all__ = [
    "CPU",
    "WAITS_PER_EPOCH_MAX",
    "Cache",
    "Cleared",
    "DeviceRange",
    "DiskFile",
    "DiskSnapshot",
    "Event",
    "EventsSnapshot",
    "LearntFile",
    "Listener",
    "MappedGroup",
    "PacketChannel",
    "SessionAbout",
    "Snapshot",
    "Teller",
    "grow",
    "run_ticks",
]
