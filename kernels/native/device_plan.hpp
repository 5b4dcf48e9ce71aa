// What a copy engine is asked to do: which bytes of device memory belong to which bytes of the pool. This code only computes
// addresses; it reads and writes nothing. The fewer descriptors, the faster the copies: a driver takes about half a
// microsecond for each, and merges none of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "block_planes.hpp"

namespace kvtier {

// cuMemcpy2D refuses larger pitches (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
constexpr std::uint64_t kPitchBytesMax = 0x7fff'ffff;

// One run of bytes that is contiguous on both sides.
struct Fragment {
    std::uint64_t device;
    std::uint64_t host;
    std::uint64_t bytes;
    std::uint32_t range;   // of device memory
    std::uint32_t region;  // of the pool
};

// `rows` runs of `width` bytes, at constant distances on both sides. A single row is a plain run, with its width for pitches.
struct Rows {
    std::uint64_t device;
    std::uint64_t host;
    std::uint64_t width;
    std::uint64_t rows;
    std::uint64_t device_pitch;
    std::uint64_t host_pitch;
    std::uint32_t range;
    std::uint32_t region;
};

// The pool as a batch of copies sees it. `borders` are offsets of the pool, in rising order, at which another registration
// with the driver begins. A copy never crosses one.
struct HostSide {
    std::uint64_t address;
    std::uint64_t bytes;
    std::span<const std::uint64_t> borders;
};

class DevicePlan {
   public:
    // The planes' bases are addresses. `ranges` has one number for each plane, or is empty if all are in one range; planes of
    // different ranges are never part of one copy. Throws unless the planes can be addressed and, within each plane, no two
    // blocks' fragments overlap.
    DevicePlan(std::vector<Plane> planes, std::vector<std::uint32_t> ranges, std::uint64_t num_blocks);

    std::uint64_t slot_bytes() const { return slot_bytes_; }
    std::uint64_t num_blocks() const { return num_blocks_; }
    std::size_t planes() const { return planes_.size(); }

    // The copies between blocks and slots, as few as contiguous runs allow. Loads (`to_device`) may name a slot several
    // times, and stores a block. Throws before anything is planned if a block or slot is out of range, targets overlap, slots
    // overlap in part, or a border lies inside a slot.
    std::vector<Fragment> describe(Numbers block_ids, const HostSide& pool, Numbers slots, bool to_device) const;
    // The same bytes in two-dimensional copies, over fragments that follow each other in the slots or over the blocks of
    // each plane, whichever needs fewer.
    std::vector<Rows> describe_rows(Numbers block_ids, const HostSide& pool, Numbers slots, bool to_device) const;

   private:
    struct Placed {
        std::uint32_t block;
        std::uint32_t slot;
        std::uint32_t region;
    };
    struct Placement {
        std::vector<Placed> blocks;  // in the order of their slots
        bool slots_repeat = false;
    };
    Placement place(Numbers block_ids, const HostSide& pool, Numbers slots, bool to_device) const;
    std::vector<Fragment> fragments_of(const Placement& placement, std::uint64_t pool_address) const;

    std::vector<Plane> planes_;
    std::vector<std::uint32_t> ranges_;
    std::uint64_t num_blocks_;
    std::uint64_t slot_bytes_;
};

}  // namespace kvtier
