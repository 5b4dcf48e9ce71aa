#include "driver_loops.hpp"

namespace kvtier {

namespace {

constexpr std::uint32_t kMemoryHost = 1, kMemoryDevice = 2;

static_assert(sizeof(void*) == 8, "the driver's structures are those of a 64-bit machine");
static_assert(sizeof(Copy2D) == 128 && offsetof(Copy2D, source_type) == 16 && offsetof(Copy2D, source_host) == 24 &&
              offsetof(Copy2D, source_device) == 32 && offsetof(Copy2D, source_pitch) == 48 &&
              offsetof(Copy2D, target_type) == 72 && offsetof(Copy2D, target_host) == 80 &&
              offsetof(Copy2D, target_device) == 88 && offsetof(Copy2D, target_pitch) == 104 &&
              offsetof(Copy2D, width_bytes) == 112 && offsetof(Copy2D, height) == 120);

}  // namespace

LoopResult copy_loop(CopyFunction function, Words64 targets, Words64 sources, Words64 sizes, void* stream) {
    for (std::size_t i = 0; i < targets.size(); ++i)
        if (const int code = function(targets[i], sources[i], sizes[i], stream); code != 0) return {code, i};
    return {0, targets.size()};
}

LoopResult copy_rows_loop(Copy2DFunction function, const RowArrays& copies, bool to_device, void* stream) {
    for (std::size_t i = 0; i < copies.device.size(); ++i) {
        Copy2D copy{};
        void* const host = reinterpret_cast<void*>(copies.host[i]);
        if (to_device) {
            copy.source_type = kMemoryHost;
            copy.source_host = host;
            copy.source_pitch = copies.host_pitch[i];
            copy.target_type = kMemoryDevice;
            copy.target_device = copies.device[i];
            copy.target_pitch = copies.device_pitch[i];
        } else {
            copy.source_type = kMemoryDevice;
            copy.source_device = copies.device[i];
            copy.source_pitch = copies.device_pitch[i];
            copy.target_type = kMemoryHost;
            copy.target_host = host;
            copy.target_pitch = copies.host_pitch[i];
        }
        copy.width_bytes = copies.width[i];
        copy.height = copies.rows[i];
        if (const int code = function(&copy, stream); code != 0) return {code, i};
    }
    return {0, copies.device.size()};
}

}  // namespace kvtier
