// Submits many copies in one call, for drivers without batched copies and for two-dimensional copies, which a driver takes
// one by one. The driver's functions are called by address, so nothing of CUDA is needed to build this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtier {

using Words64 = std::span<const std::uint64_t>;

// The code of the call that failed, or 0, and how many calls succeeded before it.
struct LoopResult {
    int code;
    std::size_t done;
};

// CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
using CopyFunction = int (*)(std::uint64_t, std::uint64_t, std::size_t, void*);

// cuda.h's CUDA_MEMCPY2D_v2.
struct Copy2D {
    std::size_t source_x_bytes;
    std::size_t source_y;
    std::uint32_t source_type;
    const void* source_host;
    std::uint64_t source_device;
    void* source_array;
    std::size_t source_pitch;
    std::size_t target_x_bytes;
    std::size_t target_y;
    std::uint32_t target_type;
    void* target_host;
    std::uint64_t target_device;
    void* target_array;
    std::size_t target_pitch;
    std::size_t width_bytes;
    std::size_t height;
};

// CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream)
using Copy2DFunction = int (*)(const Copy2D*, void*);

struct RowArrays {
    Words64 device, host, width, rows, device_pitch, host_pitch;
};

// Make one call for each descriptor, in order, up to the first that fails. The spans must have the same length.
LoopResult copy_loop(CopyFunction function, Words64 targets, Words64 sources, Words64 sizes, void* stream);
LoopResult copy_rows_loop(Copy2DFunction function, const RowArrays& copies, bool to_device, void* stream);

}  // namespace kvtier
