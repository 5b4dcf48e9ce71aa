"""`python -m kvtierd.workers.disk`: the worker of one disk. Started by the supervisor only.

It lives as long as its front: told to stop, or left alone, it drops what has not started, finishes what has,
and exits with status 0. It holds the slab's lock, and the pool's, until the last byte is in place.
"""

import argparse
import mmap
import os
import signal
from pathlib import Path
from typing import NoReturn

import numpy as np
from kvtier_kernels import PoolRecords

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.errors import Refusal
from kvtierd.memory.pool_file import memory_end
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import ProtocolError
from kvtierd.workers.channel.status import IO_THREADS_MAX
from kvtierd.workers.disk.disk import OpenDisk
from kvtierd.workers.disk.faults import Faults
from kvtierd.workers.disk.jobs import JobQueue, PersistAll, read_job
from kvtierd.workers.disk.threads import DiskThreads
from kvtierd.workers.entry import Inheritance, finish, give_up, inherit, leave, run
from kvtierd.workers.log import logger
from kvtierd.workers.populate import Populator

_log = logger("kvtierd.workers.disk")

ORPHAN_DEADLINE_S = 2.0
"""Once the front is gone, how long what has begun may go on without progress. Nobody hears how it ends, and
the next front waits for this process, which keeps the pool's lock."""


def main() -> NoReturn:
    """Runs a worker and ends the process with its status."""
    inherited = inherit(_parser())
    # With this, exceeding a size limit is an error of the write, not the end of the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    arguments = inherited.arguments
    try:
        disk = _open(inherited)
        movers = disk.movers(
            np.frombuffer(inherited.pool, np.uint8), arguments.threads, arguments.queue_depth
        )
    except Refusal as refusal:
        _log.debug("the disk cannot be used", path=arguments.path, why=str(refusal))
        give_up(inherited, refusal)
    queue = JobQueue()
    threads = DiskThreads(movers, queue, inherited.channel)
    threads.start()
    records = PoolRecords(np.frombuffer(inherited.pool, np.uint8))
    populator = Populator(inherited.pool, lambda: memory_end(records), lambda: queue.busy)
    ready = wire.Ready(pid=os.getpid(), cold_reason=disk.cold_reason, direct_io=disk.is_direct)

    def handle(message: wire.ToWorker, _: list[int]) -> None:
        _handle(message, queue, threads)

    exit_status, is_orphan = run(inherited, ready, populator, handle, _log, threads.broken.is_set)
    deadline_s = arguments.operation_deadline_s
    queue.stop()
    finish(
        inherited.status, min(deadline_s, ORPHAN_DEADLINE_S) if is_orphan else deadline_s, threads.join, _log
    )
    leave(exit_status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtierd.workers.disk", description=__doc__)
    parser.add_argument("--image-fd", type=int, required=True, help="a memfd as long as the slab")
    parser.add_argument("--image-bytes", type=int, required=True)
    parser.add_argument("--path", type=Path, required=True, help="the directory that holds the slab")
    parser.add_argument("--size-bytes", type=int, required=True, help="the slab is at most as long")
    parser.add_argument("--extent-bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, choices=range(1, IO_THREADS_MAX + 1), default=2)
    parser.add_argument("--queue-depth", type=int, default=32, help="operations of each thread at once")
    parser.add_argument("--operation-deadline-s", type=float, required=True)
    parser.add_argument("--encryption-keys", type=Path, help="the folder with the keys; without: in plain")
    first = parser.add_mutually_exclusive_group(required=True)
    first.add_argument("--load", action="store_true", help="fill the image from the slab, or make both anew")
    first.add_argument("--keep", dest="load", action="store_false", help="the image is the truth")
    return parser


def _open(inherited: Inheritance) -> OpenDisk:
    """Opens the slab and the image. Raises Refusal."""
    arguments = inherited.arguments
    image = np.frombuffer(mmap.mmap(arguments.image_fd, arguments.image_bytes), np.uint8)
    os.close(arguments.image_fd)
    return OpenDisk(
        arguments.path,
        arguments.size_bytes,
        arguments.extent_bytes,
        image,
        load=arguments.load,
        status=inherited.status,
        faults=Faults(os.environ),
        keys_folder=arguments.encryption_keys,
    )


def _handle(message: wire.ToWorker, queue: JobQueue, threads: DiskThreads) -> None:
    match message.WhichOneof("body"):
        case "disk_job":
            job = read_job(message.disk_job)
            if job.kind is DiskJobKind.ADOPT:
                raise ProtocolError(f"job {job.number}: a disk adopts nothing")
            if not queue.put(job):
                job.fail_rest()
                threads.report(job)
        case "persist_records":
            queue.put_records(np.frombuffer(message.persist_records.slots, np.uint32))
        case "persist_all":
            task = PersistAll(message.persist_all.request)
            if not queue.put_everything(task):
                threads.persisted(task, "too many wait for it already")
        case kind:
            raise ProtocolError(f"a message of kind {kind}")


if __name__ == "__main__":
    main()
