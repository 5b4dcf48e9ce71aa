"""`python -m kvtierd.workers.copy`: one copy worker. Started by the supervisor only.

It lives as long as its front: told to stop, or left alone, it revokes what has not started, finishes what
has, and exits with status 0. It then still holds the pool's lock until the last byte is in place.
"""

import argparse
import contextlib
import faulthandler
import logging
import mmap
import os
import resource
import socket
import time
from typing import NoReturn

import numpy as np
from google.protobuf.message import DecodeError
from kvtier_kernels import PoolRecords

from kvtierd import logs
from kvtierd.core.errors import Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers import signals
from kvtierd.workers.channel.blocking import BlockingPacketChannel, ChannelEndedError
from kvtierd.workers.channel.packets import PacketError, ProtocolError, close_fds
from kvtierd.workers.channel.status import HEARTBEAT_PERIOD_S, StallDetector, StatusPage, StatusWord
from kvtierd.workers.copy.cpu import CpuDevice
from kvtierd.workers.copy.device import Device, DeviceUnusableError
from kvtierd.workers.copy.engine import CopyEngine
from kvtierd.workers.copy.faults import fault_in_copy
from kvtierd.workers.log import logger
from kvtierd.workers.populate import Populator

_log = logger("kvtierd.workers.copy")

NICENESS = 5
"""Copies give way to the engine and to the front, which both wait for nobody."""

STUCK_STATUS = 75


def main() -> NoReturn:
    """Runs a worker and ends the process with its status."""
    arguments = _parse()
    faulthandler.enable()
    logs.configure(arguments.log_level, arguments.log_format)
    signals.ignore()
    os.nice(NICENESS)
    _, fds_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds_max, fds_max))

    status = StatusPage(arguments.status_fd)
    os.close(arguments.status_fd)
    channel = BlockingPacketChannel(socket.socket(fileno=arguments.channel_fd))
    # The pool's descriptor stays open as long as this process lives: it is the pool's lock.
    pool = mmap.mmap(arguments.pool_fd, arguments.pool_bytes)
    records = PoolRecords(np.frombuffer(pool, np.uint8))
    try:
        device = _device(arguments, pool, records, status)
    except DeviceUnusableError as error:
        # The front says it in the log, once.
        _log.debug("the device cannot be served", device=arguments.device, why=str(error.refusal))
        with contextlib.suppress(ChannelEndedError):
            channel.send(_unusable(error.refusal))
        _leave(0)
    engine = CopyEngine(device, records, channel, status)
    engine.start()
    populator = Populator(pool, engine.is_busy, device)
    # Before Ready: a worker that stood still right after it, without ever a beat, would not be found out.
    status.enter(StatusWord.HEARTBEAT)
    try:
        channel.send(wire.ToFront(ready=wire.Ready(pid=os.getpid())).SerializeToString())
        populator.start()
        _serve(engine, channel, status)
        exit_status = 0
    except ChannelEndedError:
        exit_status = 0
    except Exception:
        _log.critical("the worker ends: what has started is finished, nothing else is", exc_info=True)
        exit_status = 1
    populator.stop()
    _finish(engine, status, arguments.copy_deadline_s)
    _leave(exit_status)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvtierd.workers.copy", description=__doc__)
    parser.add_argument("--pool-fd", type=int, required=True, help="the pool file, locked")
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--channel-fd", type=int, required=True, help="a SOCK_SEQPACKET socket to the front")
    parser.add_argument("--status-fd", type=int, required=True, help="a memfd of one page")
    parser.add_argument("--device", required=True, help='"cpu", or "GPU-" and a UUID')
    parser.add_argument("--copy-deadline-s", type=float, required=True)
    parser.add_argument(
        "--copy-method", choices=["auto", "batch", "loop", "rows"], default="auto", help="of a GPU"
    )
    parser.add_argument("--seal-threads", type=int, default=2, help="of a GPU")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=["auto", "human", "json"], default="auto")
    return parser.parse_args()


def _device(
    arguments: argparse.Namespace, pool: mmap.mmap, records: PoolRecords, status: StatusPage
) -> Device:
    """The device, ready. DeviceUnusableError."""
    fault = fault_in_copy(os.environ)
    if arguments.device == "cpu":
        return CpuDevice(pool, records, fault)
    # Only here: a worker for the CPU needs no driver, and imports none of this.
    from kvtierd.workers.copy.gpu.device import GpuDevice, GpuOptions

    options = GpuOptions(arguments.copy_method, arguments.seal_threads, arguments.copy_deadline_s)
    return GpuDevice(arguments.device, pool, arguments.pool_fd, records, status, options, fault)


def _unusable(refusal: Refusal) -> bytes:
    unusable = wire.Unusable(
        reason=int(refusal.reason), field=refusal.field, value=refusal.value, message=refusal.message[:4_000]
    )
    return wire.ToFront(unusable=unusable).SerializeToString()


def _serve(engine: CopyEngine, channel: BlockingPacketChannel, status: StatusPage) -> None:
    """Handles messages until the front says stop or is gone."""
    while True:
        status.enter(StatusWord.HEARTBEAT)
        if not channel.wait(HEARTBEAT_PERIOD_S):
            continue
        received = channel.receive()
        if received is None:
            return
        packet, fds = received
        try:
            message = wire.ToWorker.FromString(packet)
            if message.HasField("stop"):
                return
            engine.handle(message, fds)
        except (DecodeError, PacketError) as error:
            raise ProtocolError(f"a packet of {len(packet)} bytes that is no message: {error}") from error
        finally:
            close_fds(fds)


def _finish(engine: CopyEngine, status: StatusPage, copy_deadline_s: float) -> None:
    """Ends the lanes. If one is stuck there may be no supervisor left to see it: then the end of the process
    is the fence."""
    engine.stop()
    stalls = StallDetector(copy_deadline_s)
    settling_s = 0.0
    last_s = time.monotonic()
    while True:
        status.enter(StatusWord.HEARTBEAT)
        if engine.join(HEARTBEAT_PERIOD_S / 4):
            return
        now_s = time.monotonic()
        elapsed_s = min(now_s - last_s, HEARTBEAT_PERIOD_S)
        last_s = now_s
        stuck = stalls.observe(status.read(), elapsed_s)
        if engine.has_landed:
            settling_s += elapsed_s
            if settling_s >= copy_deadline_s:
                stuck = f"what has landed is not settled after {settling_s:.1f} s"
        if stuck is not None:
            _log.error("the worker ends at once", why=stuck)
            _leave(STUCK_STATUS)


def _leave(status: int) -> NoReturn:
    """Ends the process without an end of the interpreter: threads may be inside a driver, or still have
    something to unmap, and the end of the process does all that is left."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
