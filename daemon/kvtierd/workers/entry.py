"""What every worker does from start to end: it takes over what it inherits from the daemon, reports that it
is ready, serves until the daemon stops it or is gone, and ends with nothing left under way.

The daemon's process is called the front here. Workers talk to it over one channel.
"""

import argparse
import contextlib
import faulthandler
import gc
import logging
import mmap
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from google.protobuf.message import DecodeError

from kvtierd import logs
from kvtierd.core.errors import Refusal
from kvtierd.logs import Fields
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers import signals
from kvtierd.workers.channel import packets
from kvtierd.workers.channel.status import HEARTBEAT_PERIOD_S, StallDetector, StatusPage, StatusWord
from kvtierd.workers.populate import Populator

NICENESS = 5
"""Workers give way to the engine and to the front, because everybody waits for these."""
OOM_SCORE_RISE = 100
"""Workers' badness for the kernel when memory is short, above the front's and in thousandths of the memory. A
worker that is killed costs misses and is replaced; the front's end would end everything."""
STUCK_STATUS = 75
"""The exit status of a worker that could not finish what it had begun."""


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a worker gets from its front."""

    arguments: argparse.Namespace
    status: StatusPage
    channel: packets.BlockingPacketChannel
    pool: mmap.mmap
    """The host pool. Its descriptor stays open as long as the process lives, because it holds the pool's
    lock."""


def inherit(parser: argparse.ArgumentParser) -> Inheritance:
    """Adds the arguments that every worker has to `parser`, reads the command line, and opens what it
    names."""
    parser.add_argument("--pool-fd", type=int, required=True, help="the pool file, locked")
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--channel-fd", type=int, required=True, help="a SOCK_SEQPACKET socket to the front")
    parser.add_argument("--status-fd", type=int, required=True, help="a memfd of one page")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=["auto", "human", "json"], default="auto")
    arguments = parser.parse_args()
    faulthandler.enable()
    logs.configure(arguments.log_level, arguments.log_format)
    signals.ignore()
    os.nice(NICENESS)
    _volunteer_for_oom_kills()
    _, fds_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds_max, fds_max))
    status = StatusPage(arguments.status_fd)
    os.close(arguments.status_fd)
    channel = packets.BlockingPacketChannel(socket.socket(fileno=arguments.channel_fd))
    return Inheritance(arguments, status, channel, mmap.mmap(arguments.pool_fd, arguments.pool_bytes))


def _volunteer_for_oom_kills() -> None:
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # not where /proc is read-only
        path.write_text(str(min(int(path.read_text()) + OOM_SCORE_RISE, 1000)))


def give_up(inherited: Inheritance, refusal: Refusal) -> NoReturn:
    """Tells the front why the device cannot be used, and ends the process. The front logs it once."""
    unusable = wire.Unusable(
        reason=int(refusal.reason), field=refusal.field, value=refusal.value, message=refusal.message[:4_000]
    )
    with contextlib.suppress(packets.ChannelEndedError):
        inherited.channel.send(wire.ToFront(unusable=unusable).SerializeToString())
    leave(0)


def run(
    inherited: Inheritance,
    ready: wire.Ready,
    populator: Populator,
    handle: Callable[[wire.ToWorker, list[int]], None],
    log: Fields,
    is_broken: Callable[[], bool] = lambda: False,
) -> tuple[int, bool]:
    """Reports that the worker is ready, and passes each message and its descriptors to `handle`, until the
    front says stop or is gone, `is_broken()` is true, or `handle` raises.

    Returns the exit status, and whether the front is gone.
    """
    # This comes before Ready: otherwise nobody would notice a worker that hangs right after it.
    inherited.status.enter(StatusWord.HEARTBEAT)
    gc.freeze()  # what is there now stays, so no collection has to look at it again
    exit_status, is_orphan = 0, False
    try:
        inherited.channel.send(wire.ToFront(ready=ready).SerializeToString())
        populator.start()
        _serve(inherited, handle, is_broken)
        exit_status = 1 if is_broken() else 0
    except packets.ChannelEndedError:
        is_orphan = True
    except Exception:
        log.critical("the worker ends: what has started is finished, nothing else is", exc_info=True)
        exit_status = 1
    populator.stop()
    return exit_status, is_orphan


def _serve(
    inherited: Inheritance,
    handle: Callable[[wire.ToWorker, list[int]], None],
    is_broken: Callable[[], bool],
) -> None:
    """Raises ChannelEndedError when the front is gone, ProtocolError for a packet that is no message."""
    while not is_broken():
        inherited.status.enter(StatusWord.HEARTBEAT)
        if not inherited.channel.wait(HEARTBEAT_PERIOD_S):
            continue
        received = inherited.channel.receive()
        if received is None:
            raise packets.ChannelEndedError
        packet, fds = received
        try:
            message = wire.ToWorker.FromString(packet)
            if message.HasField("stop"):
                return
            handle(message, fds)
        except (DecodeError, packets.PacketError) as error:
            raise packets.ProtocolError(
                f"a packet of {len(packet)} bytes that is no message: {error}"
            ) from error
        finally:
            packets.close_fds(fds)


def finish(
    status: StatusPage,
    deadline_s: float,
    join: Callable[[float], bool],
    log: Fields,
    overdue: Callable[[float], str | None] = lambda _: None,
) -> None:
    """Waits until `join(timeout_s)` says that the threads have ended. Ends the process if they make no
    progress for `deadline_s`, or if `overdue(elapsed_s)`, called again and again, says why it must end: there
    may be no supervisor left to notice, and then the end of the process is the fence."""
    stalls = StallDetector(deadline_s)
    last_s = time.monotonic()
    while True:
        status.enter(StatusWord.HEARTBEAT)
        if join(HEARTBEAT_PERIOD_S / 4):
            return
        now_s = time.monotonic()
        elapsed_s = min(now_s - last_s, HEARTBEAT_PERIOD_S)
        last_s = now_s
        stuck = stalls.observe(status.read(), elapsed_s)
        stuck = overdue(elapsed_s) or stuck
        if stuck is not None:
            log.error("the worker ends at once", why=stuck)
            leave(STUCK_STATUS)


def leave(status: int) -> NoReturn:
    """Ends the process without finalising the interpreter. Threads may be inside a driver, wait for a disk,
    or still have something to unmap, and the end of the process does all of that."""
    logging.shutdown()
    os._exit(status)
