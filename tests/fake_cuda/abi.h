/* What callers of libcuda.so.1 rely on: types, codes and the layout of structs, as far as this double implements them. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT = 219,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_ASSERT = 710,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_TENSOR_MEMORY_LEAK = 721,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_UNKNOWN = 999,
};

typedef struct {
    char bytes[16];
} CUuuid;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

typedef struct {
    int type; /* 1: a device, 2: the host */
    int id;
} CUmemLocation;

typedef struct {
    int type;                    /* 1: pinned */
    int requested_handle_types;  /* 1: POSIX descriptor */
    CUmemLocation location;
    void *windows;
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags; /* 0: none, 1: read, 3: read and write */
} CUmemAccessDesc;

typedef struct {
    int source_access_order; /* 1: stream, 2: during the call, 3: any */
    CUmemLocation source_hint;
    CUmemLocation destination_hint;
    unsigned int flags; /* 1: prefer overlap with compute */
} CUmemcpyAttributes;

typedef struct {
    size_t source_x;
    size_t source_y;
    int source_type; /* 1: host, 2: device, 4: unified */
    const void *source_host;
    CUdeviceptr source_device;
    void *source_array;
    size_t source_pitch;
    size_t destination_x;
    size_t destination_y;
    int destination_type;
    void *destination_host;
    CUdeviceptr destination_device;
    void *destination_array;
    size_t destination_pitch;
    size_t width;
    size_t height;
} CUDA_MEMCPY2D;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "as the driver's");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "as the driver's");
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "as the driver's");
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "as the driver's");
