"""An engine to be killed: `python -m tests.integration.daemon.gpu_victim RUN MOMENT`.

Registers as far as MOMENT ("words", "chunks" or "memory") on the first GPU, says so, and does nothing more.
"""

import signal
import sys
from pathlib import Path

from kvtier_kernels import cuda

from tests.integration.daemon.gpu import Gpu, GpuSession


def main(run: Path, moment: str) -> None:
    gpu = Gpu(cuda.load())
    session = GpuSession(run / "kvtierd.sock", gpu)
    session.attach()
    session.register_words()
    if moment != "words":
        _, fds = gpu.chunks(3)
        session.add_chunks(fds)
    if moment == "memory":
        request = session.chunk_places(3)
        piece = gpu.allocate(4096)
        request.ranges.append(gpu.ipc_range(piece))
        request.mapping_bytes += 4096
        session.register(request)
    print("registered", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
