"""The CUDA driver, by ctypes on libcuda.so.1: memory sharing, streams, events and batched copies.

Importing this package loads nothing. `load()` loads the driver, and says what is missing if it cannot. The
package uses neither torch nor the CUDA runtime. KVTIER_CUDA_LIBRARY names another library than the installed
driver's.
"""

from kvtier_kernels.cuda.abi import HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD, IPC_HANDLE_BYTES
from kvtier_kernels.cuda.contexts import Context
from kvtier_kernels.cuda.copies import DESCRIPTORS_PER_CALL, Copies, CopyMethod
from kvtier_kernels.cuda.devices import DeviceInfo, device_name
from kvtier_kernels.cuda.driver import Driver, load
from kvtier_kernels.cuda.errors import DEVICE_UNAVAILABLE, STICKY_CODES, CudaError, CudaUnavailableError
from kvtier_kernels.cuda.memory import PointerInfo

__all__ = [
    "DESCRIPTORS_PER_CALL",
    "DEVICE_UNAVAILABLE",
    "HANDLE_TYPE_FABRIC",
    "HANDLE_TYPE_POSIX_FD",
    "IPC_HANDLE_BYTES",
    "STICKY_CODES",
    "Context",
    "Copies",
    "CopyMethod",
    "CudaError",
    "CudaUnavailableError",
    "DeviceInfo",
    "Driver",
    "PointerInfo",
    "device_name",
    "load",
]
