"""`python -m kvtierd.workers.store`: the worker of a store. Started by the supervisor only.

It lives as long as its front: told to stop, or left alone, it drops what has not started, finishes what has,
and exits with status 0. It holds the pool's lock until the last byte is in place.
"""

import argparse
import json
import mmap
import os
import threading
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from kvtier_kernels import PoolRecords, format_pool

from kvtierd.core.errors import Refusal
from kvtierd.memory.pool_file import config_digest, memory_end
from kvtierd.tiers.disk.image import disk_geometry
from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.coding import Compression
from kvtierd.tiers.store.drivers import open_driver
from kvtierd.tiers.store.guarded import GuardedStore
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import ChannelEndedError, ProtocolError
from kvtierd.workers.disk.jobs import read_job
from kvtierd.workers.entry import Inheritance, finish, give_up, inherit, leave, run
from kvtierd.workers.log import logger
from kvtierd.workers.populate import Populator
from kvtierd.workers.store.locations import Locations
from kvtierd.workers.store.looking import Looking
from kvtierd.workers.store.loop import StoreLoop
from kvtierd.workers.store.moving import StoreMover
from kvtierd.workers.store.shelves import Shelves
from kvtierd.workers.supervisor.kinds import OPTIONS_VARIABLE

_log = logger("kvtierd.workers.store")

ORPHAN_DEADLINE_S = 2.0
"""Once the front is gone, how long what has begun may go on without progress."""


def main() -> NoReturn:
    """Runs a worker and ends the process with its status."""
    inherited = inherit(_parser())
    arguments = inherited.arguments
    stuck = threading.Event()
    try:
        make = _maker(inherited, stuck)
    except Refusal as refusal:
        give_up(inherited, refusal)
    loop = StoreLoop(
        make, inherited.channel, inherited.status, reads=arguments.reads, writes=arguments.writes
    )
    loop.start()
    records = PoolRecords(np.frombuffer(inherited.pool, np.uint8))
    populator = Populator(inherited.pool, lambda: memory_end(records), lambda: loop.busy)
    cold = "what other hosts have put there is looked for now" if arguments.load else ""
    ready = wire.Ready(pid=os.getpid(), cold_reason=cold, direct_io=True)

    def handle(message: wire.ToWorker, _: list[int]) -> None:
        _handle(message, loop, inherited)

    def is_broken() -> bool:
        return loop.broken.is_set() or stuck.is_set()

    exit_status, is_orphan = run(inherited, ready, populator, handle, _log, is_broken)
    if stuck.is_set():
        _log.error("a call of the store's driver goes on although it was cancelled, so its process ends")
    deadline_s = arguments.operation_deadline_s
    loop.stop()
    finish(inherited.status, min(deadline_s, ORPHAN_DEADLINE_S) if is_orphan else deadline_s, loop.join, _log)
    leave(exit_status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtierd.workers.store", description=__doc__)
    parser.add_argument("--image-fd", type=int, required=True, help="a memfd with the records of the slots")
    parser.add_argument("--image-bytes", type=int, required=True)
    parser.add_argument("--extent-bytes", type=int, required=True)
    parser.add_argument("--url", required=True, help="where the store is, for example s3://bucket/folder")
    parser.add_argument("--prefix", default="", help="the folder of kvtier's objects in the store")
    parser.add_argument("--host", required=True, help="8 hexadecimal digits that name this daemon")
    parser.add_argument("--reads", type=int, default=16, help="jobs that read at once")
    parser.add_argument("--writes", type=int, default=4, help="jobs that write at once")
    parser.add_argument("--call-deadline-s", type=float, required=True, help="for each call of the store")
    parser.add_argument("--look-every-s", type=float, required=True, help="for what other hosts have put")
    methods = [each.value for each in Compression]
    parser.add_argument(
        "--compression", choices=methods, default=Compression.OFF.value, help="of what is put"
    )
    parser.add_argument("--operation-deadline-s", type=float, required=True)
    first = parser.add_mutually_exclusive_group(required=True)
    first.add_argument("--load", action="store_true", help="make the image")
    first.add_argument("--keep", dest="load", action="store_false", help="the image is made")
    return parser


Make = Callable[[Callable[[wire.ToFront], None]], tuple[StoreMover, Looking]]


def _maker(inherited: Inheritance, stuck: threading.Event) -> Make:
    """Opens the image and the store. Raises Refusal. `stuck` is set when only the end of the process ends a
    call of the store."""
    arguments = inherited.arguments
    options = json.loads(os.environ.pop(OPTIONS_VARIABLE, "{}"))
    deadline_s = arguments.call_deadline_s
    store = GuardedStore(open_driver(arguments.url, options, deadline_s), deadline_s, stuck.set)
    array = np.frombuffer(mmap.mmap(arguments.image_fd, arguments.image_bytes), np.uint8)
    os.close(arguments.image_fd)
    geometry = disk_geometry(arguments.image_bytes, arguments.extent_bytes)
    if arguments.load:
        format_pool(array, geometry.extent_bytes, geometry.extents, config_digest(geometry))
    image = PoolRecords(array)
    coder = Coder(Compression(arguments.compression))
    shelves = Shelves(store, arguments.prefix, arguments.host, coder)
    pool = np.frombuffer(inherited.pool, np.uint8)

    def make(send: Callable[[wire.ToFront], None]) -> tuple[StoreMover, Looking]:
        mover = StoreMover(pool, PoolRecords(pool), image, Locations(image, geometry), shelves)
        looking = Looking(shelves, arguments.look_every_s, lambda found: send(wire.ToFront(pack_found=found)))
        return mover, looking

    return make


def _handle(message: wire.ToWorker, loop: StoreLoop, inherited: Inheritance) -> None:
    match message.WhichOneof("body"):
        case "disk_job":
            loop.put(read_job(message.disk_job))
        case "watch_space":
            loop.watch(message.watch_space)
        case "unwatch_space":
            loop.unwatch(message.unwatch_space)
        case "persist_records":
            pass  # the image is all there is
        case "persist_all":
            done = wire.RecordsPersisted(request=message.persist_all.request)
            try:
                inherited.channel.send(wire.ToFront(records_persisted=done).SerializeToString())
            except ChannelEndedError:
                pass
        case kind:
            raise ProtocolError(f"a message of kind {kind}")


if __name__ == "__main__":
    main()
