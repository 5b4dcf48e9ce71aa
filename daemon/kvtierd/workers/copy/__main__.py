"""`python -m kvtierd.workers.copy`: one copy worker. Started by the supervisor only.

It lives as long as its front: told to stop, or left alone, it revokes what has not started, finishes what
has, and exits with status 0. It then still holds the pool's lock until the last byte is in place.
"""

import argparse
import os
from typing import NoReturn

import numpy as np
from kvtier_kernels import PoolRecords

from kvtierd.memory.pool_file import memory_end
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.cpu import CpuDevice
from kvtierd.workers.copy.device import Device, DeviceUnusableError
from kvtierd.workers.copy.engine import CopyEngine
from kvtierd.workers.copy.faults import fault_in_copy
from kvtierd.workers.entry import Inheritance, finish, give_up, inherit, leave, run
from kvtierd.workers.lane_chunks import LaneChunks, Pacing
from kvtierd.workers.log import logger
from kvtierd.workers.populate import Populator

_log = logger("kvtierd.workers.copy")


def main() -> NoReturn:
    """Runs a worker and ends the process with its status."""
    inherited = inherit(_parser())
    records = PoolRecords(np.frombuffer(inherited.pool, np.uint8))
    try:
        device = _device(inherited, records)
    except DeviceUnusableError as error:
        _log.debug("the device cannot be served", device=inherited.arguments.device, why=str(error.refusal))
        give_up(inherited, error.refusal)
    engine = CopyEngine(device, records, inherited.channel, inherited.status)
    engine.start()
    populator = Populator(inherited.pool, lambda: memory_end(records), engine.is_busy, device)
    exit_status, _ = run(inherited, wire.Ready(pid=os.getpid()), populator, engine.handle, _log)
    _finish(engine, inherited)
    leave(exit_status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtierd.workers.copy", description=__doc__)
    parser.add_argument("--device", required=True, help='"cpu", or "GPU-" and a UUID')
    parser.add_argument("--copy-deadline-s", type=float, required=True)
    parser.add_argument(
        "--copy-method", choices=["auto", "batch", "loop", "rows"], default="auto", help="of a GPU"
    )
    parser.add_argument("--seal-threads", type=int, default=0, help="of a GPU")
    usual = LaneChunks()
    parser.add_argument("--load-chunk-bytes", type=int, default=usual.load_bytes, help="of a GPU")
    parser.add_argument("--store-chunk-bytes", type=int, default=usual.store_bytes, help="of a GPU")
    parser.add_argument("--flights", type=int, default=usual.flights, help="of a GPU")
    parser.add_argument("--pacing", type=Pacing, default=usual.pacing, help="of a GPU")
    parser.add_argument("--paced-chunk-bytes", type=int, default=usual.paced_bytes, help="of a GPU")
    return parser


def _device(inherited: Inheritance, records: PoolRecords) -> Device:
    """Opens the device. Raises DeviceUnusableError."""
    arguments, fault = inherited.arguments, fault_in_copy(os.environ)
    if arguments.device == "cpu":
        return CpuDevice(inherited.pool, records, fault)
    # This is imported only here, because a worker for the CPU needs no driver.
    from kvtierd.workers.copy.gpu.device import GpuDevice, GpuOptions

    chunks = LaneChunks(
        arguments.load_chunk_bytes,
        arguments.store_chunk_bytes,
        arguments.flights,
        arguments.pacing,
        arguments.paced_chunk_bytes,
    )
    options = GpuOptions(arguments.copy_method, arguments.seal_threads, arguments.copy_deadline_s, chunks)
    return GpuDevice(
        arguments.device, inherited.pool, arguments.pool_fd, records, inherited.status, options, fault
    )


def _finish(engine: CopyEngine, inherited: Inheritance) -> None:
    """Ends the lanes. Ends the process if one of them is stuck, or if parts that have landed are not settled
    in time."""
    deadline_s = inherited.arguments.copy_deadline_s
    settling_s = 0.0

    def overdue(elapsed_s: float) -> str | None:
        nonlocal settling_s
        if engine.has_landed:
            settling_s += elapsed_s
            if settling_s >= deadline_s:
                return f"what has landed is not settled after {settling_s:.1f} s"
        return None

    engine.stop()
    finish(inherited.status, deadline_s, engine.join, _log, overdue)


if __name__ == "__main__":
    main()
