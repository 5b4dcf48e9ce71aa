"""The results of calls of the CUDA driver, and what users can do about them."""

from typing import Final

SUCCESS: Final = 0
INVALID_VALUE: Final = 1
DEVICE_UNAVAILABLE: Final = 46
NOT_READY: Final = 600
UNKNOWN: Final = 999

STICKY_CODES: Final = frozenset(
    {
        214,  # ECC_UNCORRECTABLE
        219,  # INVALID_GRAPHICS_CONTEXT
        220,  # NVLINK_UNCORRECTABLE
        226,  # CONTAINED
        700,  # ILLEGAL_ADDRESS
        702,  # LAUNCH_TIMEOUT
        709,  # CONTEXT_IS_DESTROYED
        710,  # ASSERT
        714,  # HARDWARE_STACK_ERROR
        715,  # ILLEGAL_INSTRUCTION
        716,  # MISALIGNED_ADDRESS
        717,  # INVALID_ADDRESS_SPACE
        718,  # INVALID_PC
        719,  # LAUNCH_FAILED
        721,  # TENSOR_MEMORY_LEAK
        810,  # MPS_CLIENT_TERMINATED
        911,  # EXTERNAL_DEVICE
        UNKNOWN,
    }
)
"""Errors after which the context is lost: every later call fails, and only a new process can go on. cuda.h
says so about most of them ("the process must be terminated and relaunched"). The hardware errors and UNKNOWN
are treated alike, because a process that starts again is safe, and one that goes on with doubtful memory is
not."""


class CudaError(Exception):
    """A driver call failed.

    `call` is the function as the library exports it, `code` its result and `name` the driver's name for it.
    `arguments` are the call's plain arguments, for the log. If `sticky`, the context is lost and this process
    must exit. A failed call may report the failure of an earlier asynchronous call.
    """

    def __init__(
        self, call: str, code: int, name: str, arguments: str = "", sticky: bool | None = None
    ) -> None:
        """`sticky` None decides by STICKY_CODES."""
        super().__init__(call, code, name, arguments, sticky)
        self.call = call
        self.code = code
        self.name = name
        self.arguments = arguments
        self.sticky = code in STICKY_CODES if sticky is None else sticky

    def __str__(self) -> str:
        lost = "; the context is lost" if self.sticky else ""
        return f"{self.call}({self.arguments}) failed: {self.name} ({self.code}){lost}"


ANSWERS_UNKNOWN_TO_BAD_INPUT: Final = frozenset(
    {
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    }
)
"""Calls that may return UNKNOWN for an invalid handle or descriptor, or one that a container does not let
through, although the context is as it was. After these the context is asked whether it is lost."""


class CudaUnavailableError(Exception):
    """This process cannot use CUDA. The message says what was tried and what to do. `code` is the driver's
    error, or None if none was asked."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def init_advice(code: int) -> str:
    """What a user can do about cuInit failing with `code`."""
    return _INIT_ADVICE.get(code, "see whether nvidia-smi works here and what the kernel log says of NVRM")


_INIT_ADVICE: Final = {
    34: "this is the toolkit's stub library, not a driver: remove its directory from LD_LIBRARY_PATH or set "
    "KVTIER_CUDA_LIBRARY to the driver's own libcuda.so.1",
    100: "no GPU is visible: look at CUDA_VISIBLE_DEVICES, and give a container the GPUs "
    "(--gpus, or the device plugin)",
    101: "no valid GPU is visible: look at CUDA_VISIBLE_DEVICES",
    802: "the system is not ready: is nvidia-fabricmanager running?",
    803: "libcuda.so.1 and the kernel module are of different versions: reload the module or reboot after a "
    "driver update, and do not bake libcuda.so.1 into a container image",
    804: "the forward-compatibility libcuda.so.1 does not support this GPU: use the driver's own",
    999: "the device files may be missing or the kernel module in a bad state: see whether nvidia-smi works "
    "here; nvidia-modprobe -u -c 0 makes /dev/nvidia-uvm",
}
