"""The part of cuda.h that the binding uses: structures, constants and prototypes (as of CUDA 12.0 to 13.0).

tests/unit/cuda/test_abi.py checks sizes and offsets.
"""

from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from typing import Any, Final

# CUdeviceptr and CUmemGenericAllocationHandle are integers of 64 bits, CUcontext, CUstream and CUevent are
# pointers, CUdevice is an int. A c_void_p parameter takes a Python int.
CUdeviceptr = c_uint64
CUhandle = c_uint64

VERSION_MIN: Final = 12000
VERSION_BATCH: Final = 12080
VERSION_BATCH_V2: Final = 13000

IPC_HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16

CAPTURE_MODE_RELAXED: Final = 2
IPC_MEM_LAZY_ENABLE_PEER_ACCESS: Final = 1
MEMHOSTREGISTER_PORTABLE: Final = 1
MEMHOSTREGISTER_DEVICEMAP: Final = 2
STREAM_NON_BLOCKING: Final = 1
EVENT_BLOCKING_SYNC: Final = 1
EVENT_DISABLE_TIMING: Final = 2

MEMORYTYPE_HOST: Final = 1
MEMORYTYPE_DEVICE: Final = 2
POINTER_ATTRIBUTE_MEMORY_TYPE: Final = 2
POINTER_ATTRIBUTE_BUFFER_ID: Final = 7
POINTER_ATTRIBUTE_DEVICE_ORDINAL: Final = 9
POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: Final = 10
POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: Final = 14
POINTER_ATTRIBUTE_MAPPING_SIZE: Final = 18
POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: Final = 19

HANDLE_TYPE_NONE: Final = 0
HANDLE_TYPE_POSIX_FD: Final = 1
HANDLE_TYPE_FABRIC: Final = 8
ALLOCATION_TYPE_PINNED: Final = 1
LOCATION_TYPE_DEVICE: Final = 1
LOCATION_TYPE_HOST: Final = 2
ACCESS_READ_WRITE: Final = 3
GRANULARITY_MINIMUM: Final = 0

SRC_ACCESS_ORDER_STREAM: Final = 1
SRC_ACCESS_ORDER_ANY: Final = 3
MEMCPY_FLAG_PREFER_OVERLAP: Final = 1

GET_PROC_ADDRESS_DEFAULT: Final = 0
PROC_ADDRESS_FOUND: Final = 0


class CUuuid(Structure):
    _fields_ = (("bytes", c_ubyte * UUID_BYTES),)


class CUipcMemHandle(Structure):
    _fields_ = (("reserved", c_ubyte * IPC_HANDLE_BYTES),)


class CUmemLocation(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class CUmemAllocationFlags(Structure):
    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class CUmemAllocationProp(Structure):
    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", CUmemLocation),
        ("win32_handle_meta_data", c_void_p),
        ("alloc_flags", CUmemAllocationFlags),
    )


class CUmemAccessDesc(Structure):
    _fields_ = (("location", CUmemLocation), ("flags", c_int))


class CUmemcpyAttributes(Structure):
    _fields_ = (
        ("src_access_order", c_int),
        ("src_location_hint", CUmemLocation),
        ("dst_location_hint", CUmemLocation),
        ("flags", c_uint),
    )


_OUT_PTR: Final = POINTER(CUdeviceptr)
_OUT_HANDLE: Final = POINTER(CUhandle)
_OUT_POINTER: Final = POINTER(c_void_p)
_OUT_INT: Final = POINTER(c_int)
_OUT_SIZE: Final = POINTER(c_size_t)
_OUT_UUID: Final = POINTER(CUuuid)

PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_OUT_INT,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, _OUT_POINTER, c_int, c_uint64, _OUT_INT),
    # devices and contexts
    "cuDeviceGetCount": (_OUT_INT,),
    "cuDeviceGet": (_OUT_INT, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid": (_OUT_UUID, c_int),
    "cuDeviceGetUuid_v2": (_OUT_UUID, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceTotalMem_v2": (_OUT_SIZE, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT_POINTER, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (_OUT_POINTER,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT_POINTER,),
    "cuCtxGetStreamPriorityRange": (_OUT_INT, _OUT_INT),
    "cuThreadExchangeStreamCaptureMode": (_OUT_INT,),
    # memory
    "cuMemGetInfo_v2": (_OUT_SIZE, _OUT_SIZE),
    "cuMemAlloc_v2": (_OUT_PTR, c_size_t),
    "cuMemFree_v2": (CUdeviceptr,),
    "cuMemGetAddressRange_v2": (_OUT_PTR, _OUT_SIZE, CUdeviceptr),
    "cuPointerGetAttributes": (c_uint, POINTER(c_int), POINTER(c_void_p), CUdeviceptr),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (_OUT_PTR, c_void_p, c_uint),
    # memory of other processes
    "cuIpcGetMemHandle": (POINTER(CUipcMemHandle), CUdeviceptr),
    "cuIpcOpenMemHandle_v2": (_OUT_PTR, CUipcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (CUdeviceptr,),
    # virtual memory
    "cuMemCreate": (_OUT_HANDLE, c_size_t, POINTER(CUmemAllocationProp), c_ulonglong),
    "cuMemRelease": (CUhandle,),
    "cuMemRetainAllocationHandle": (_OUT_HANDLE, c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, CUhandle, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (_OUT_HANDLE, c_void_p, c_int),
    "cuMemGetAllocationGranularity": (_OUT_SIZE, POINTER(CUmemAllocationProp), c_int),
    "cuMemAddressReserve": (_OUT_PTR, c_size_t, c_size_t, CUdeviceptr, c_ulonglong),
    "cuMemAddressFree": (CUdeviceptr, c_size_t),
    "cuMemMap": (CUdeviceptr, c_size_t, c_size_t, CUhandle, c_ulonglong),
    "cuMemUnmap": (CUdeviceptr, c_size_t),
    "cuMemSetAccess": (CUdeviceptr, c_size_t, POINTER(CUmemAccessDesc), c_size_t),
    # streams and events
    "cuStreamCreateWithPriority": (_OUT_POINTER, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWriteValue64_v2": (c_void_p, CUdeviceptr, c_uint64, c_uint),
    "cuEventCreate": (_OUT_POINTER, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventQuery": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    # copies
    "cuMemcpyDtoH_v2": (c_void_p, CUdeviceptr, c_size_t),
    "cuMemcpyHtoD_v2": (CUdeviceptr, c_void_p, c_size_t),
    "cuMemcpyAsync": (CUdeviceptr, CUdeviceptr, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
}
"""Parameters of every function that is looked up by its exported name. All return a CUresult.

A name without suffix is the function's first version, whatever the current cuda.h makes of it. A later driver
still exports it, and cannot change its parameters.
"""

BATCH_PROTOTYPE: Final = (
    c_void_p,  # dsts
    c_void_p,  # srcs
    c_void_p,  # sizes
    c_size_t,  # count
    POINTER(CUmemcpyAttributes),
    POINTER(c_size_t),  # attrsIdxs
    c_size_t,  # numAttrs
    POINTER(c_size_t),  # failIdx
    c_void_p,  # stream
)
"""cuMemcpyBatchAsync of CUDA 12.8 and 12.9."""

BATCH_V2_PROTOTYPE: Final = (*BATCH_PROTOTYPE[:7], c_void_p)
"""cuMemcpyBatchAsync since CUDA 13.0, which has no failIdx."""
