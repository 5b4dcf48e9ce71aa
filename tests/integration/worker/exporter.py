"""An engine to be killed: `python exporter.py BYTES BYTE` allocates memory of the first GPU, fills it with a
byte, says its handle and buffer id, and lives until somebody ends it."""

import signal
import sys

from kvtier_kernels import cuda

from tests.support.fake_cuda import FakeCuda

if __name__ == "__main__":
    size, byte = int(sys.argv[1]), int(sys.argv[2])
    driver = cuda.load()
    with driver.retain_primary(0):
        address = driver.alloc(size)
        FakeCuda.view(address, size)[:] = byte
        print(driver.ipc_export(address).hex(), driver.pointer_info(address).buffer_id, flush=True)
    signal.pause()
