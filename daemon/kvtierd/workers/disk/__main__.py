"""`python -m kvtierd.workers.disk`: the worker of one disk. Started by the supervisor only.

It lives as long as its front: told to stop, or left alone, it drops what has not started, finishes what has,
and exits with status 0. It holds the slab's lock, and the pool's, until the last byte is in place.
"""

import argparse
import contextlib
import faulthandler
import logging
import mmap
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
from google.protobuf.message import DecodeError

from kvtierd import logs
from kvtierd.core.errors import Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers import signals
from kvtierd.workers.channel.blocking import BlockingPacketChannel, ChannelEndedError
from kvtierd.workers.channel.packets import ProtocolError, close_fds
from kvtierd.workers.channel.status import (
    HEARTBEAT_PERIOD_S,
    IO_THREADS_MAX,
    StallDetector,
    StatusPage,
    StatusWord,
)
from kvtierd.workers.disk.disk import OpenDisk
from kvtierd.workers.disk.faults import Faults
from kvtierd.workers.disk.jobs import JobQueue, PersistAll, read_job
from kvtierd.workers.disk.threads import DiskThreads
from kvtierd.workers.log import logger
from kvtierd.workers.populate import Populator

_log = logger("kvtierd.workers.disk")

NICENESS = 5
"""As copy workers: the engine and the front, which wait for nobody, come first."""

STUCK_STATUS = 75

ORPHAN_DEADLINE_S = 2.0
"""How long what has begun may go on without progress once the front is gone. Nobody hears its outcome, and
the next front waits for this process, which keeps the pool's lock."""


def main() -> NoReturn:
    """Runs a worker and ends the process with its status."""
    arguments = _parse()
    faulthandler.enable()
    logs.configure(arguments.log_level, arguments.log_format)
    signals.ignore()
    os.nice(NICENESS)
    # What a size limit stops is an error of a write, not the end of the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, fds_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds_max, fds_max))

    status = StatusPage(arguments.status_fd)
    os.close(arguments.status_fd)
    channel = BlockingPacketChannel(socket.socket(fileno=arguments.channel_fd))
    # The pool's descriptor stays open as long as this process lives: it is the pool's lock.
    pool = mmap.mmap(arguments.pool_fd, arguments.pool_bytes)
    image = np.frombuffer(mmap.mmap(arguments.image_fd, arguments.image_bytes), np.uint8)
    os.close(arguments.image_fd)
    faults = Faults(os.environ)
    try:
        disk = OpenDisk(
            arguments.path,
            arguments.size_bytes,
            arguments.extent_bytes,
            image,
            load=arguments.load,
            status=status,
            faults=faults,
        )
        movers = disk.movers(np.frombuffer(pool, np.uint8), arguments.threads, arguments.queue_depth)
    except Refusal as refusal:
        # The front says it in the log, once.
        _log.debug("the disk cannot be used", path=arguments.path, why=str(refusal))
        with contextlib.suppress(ChannelEndedError):
            channel.send(_unusable(refusal))
        _leave(0)
    queue = JobQueue()
    threads = DiskThreads(movers, queue, channel)
    threads.start()
    populator = Populator(pool, lambda: queue.busy)
    # Before Ready: a worker that stood still right after it, without ever a beat, would not be found out.
    status.enter(StatusWord.HEARTBEAT)
    deadline_s = arguments.operation_deadline_s
    try:
        ready = wire.Ready(pid=os.getpid(), cold_reason=disk.cold_reason, direct_io=disk.is_direct)
        channel.send(wire.ToFront(ready=ready).SerializeToString())
        populator.start()
        _serve(queue, threads, channel, status)
        exit_status = 1 if threads.broken.is_set() else 0
    except ChannelEndedError:
        exit_status = 0
        deadline_s = min(deadline_s, ORPHAN_DEADLINE_S)
    except Exception:
        _log.critical("the worker ends: what has started is finished, nothing else is", exc_info=True)
        exit_status = 1
    populator.stop()
    _finish(queue, threads, status, deadline_s)
    _leave(exit_status)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvtierd.workers.disk", description=__doc__)
    parser.add_argument("--pool-fd", type=int, required=True, help="the pool file, locked")
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--channel-fd", type=int, required=True, help="a SOCK_SEQPACKET socket to the front")
    parser.add_argument("--status-fd", type=int, required=True, help="a memfd of one page")
    parser.add_argument("--image-fd", type=int, required=True, help="a memfd as long as the slab")
    parser.add_argument("--image-bytes", type=int, required=True)
    parser.add_argument("--path", type=Path, required=True, help="the directory that holds the slab")
    parser.add_argument("--size-bytes", type=int, required=True, help="the slab is at most as long")
    parser.add_argument("--extent-bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, choices=range(1, IO_THREADS_MAX + 1), default=2)
    parser.add_argument("--queue-depth", type=int, default=32, help="operations of each thread at once")
    parser.add_argument("--operation-deadline-s", type=float, required=True)
    first = parser.add_mutually_exclusive_group(required=True)
    first.add_argument("--load", action="store_true", help="fill the image from the slab, or make both anew")
    first.add_argument("--keep", dest="load", action="store_false", help="the image is the truth")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=["auto", "human", "json"], default="auto")
    return parser.parse_args()


def _unusable(refusal: Refusal) -> bytes:
    unusable = wire.Unusable(
        reason=int(refusal.reason), field=refusal.field, value=refusal.value, message=refusal.message[:4_000]
    )
    return wire.ToFront(unusable=unusable).SerializeToString()


def _serve(queue: JobQueue, threads: DiskThreads, channel: BlockingPacketChannel, status: StatusPage) -> None:
    """Handles messages until the front says stop, or a thread has broken. ChannelEndedError: it is gone."""
    while not threads.broken.is_set():
        status.enter(StatusWord.HEARTBEAT)
        if not channel.wait(HEARTBEAT_PERIOD_S):
            continue
        received = channel.receive()
        if received is None:
            raise ChannelEndedError
        packet, fds = received
        close_fds(fds)
        try:
            message = wire.ToWorker.FromString(packet)
        except DecodeError as error:
            raise ProtocolError(f"a packet of {len(packet)} bytes that is no message: {error}") from error
        match message.WhichOneof("body"):
            case "disk_job":
                job = read_job(message.disk_job)
                if not queue.put(job):
                    job.fail_rest()
                    threads.report(job)
            case "persist_records":
                queue.put_records(np.frombuffer(message.persist_records.slots, np.uint32))
            case "persist_all":
                task = PersistAll(message.persist_all.request)
                if not queue.put_everything(task):
                    threads.persisted(task, "too many wait for it already")
            case "stop":
                return
            case kind:
                raise ProtocolError(f"a message of kind {kind}")


def _finish(queue: JobQueue, threads: DiskThreads, status: StatusPage, deadline_s: float) -> None:
    """Ends the threads. If the disk hangs there may be no supervisor left to see it: then the end of the
    process is the fence."""
    queue.stop()
    stalls = StallDetector(deadline_s)
    last_s = time.monotonic()
    while True:
        status.enter(StatusWord.HEARTBEAT)
        if threads.join(HEARTBEAT_PERIOD_S / 4):
            return
        now_s = time.monotonic()
        stuck = stalls.observe(status.read(), min(now_s - last_s, HEARTBEAT_PERIOD_S))
        last_s = now_s
        if stuck is not None:
            _log.error("the worker ends at once", why=stuck)
            _leave(STUCK_STATUS)


def _leave(status: int) -> NoReturn:
    """Ends the process without an end of the interpreter: a thread may be waiting for the disk, and the end
    of the process does all that is left."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
