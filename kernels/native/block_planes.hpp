// What copies from and to both kinds of memory share: planes of fragments, and checks of everything that names blocks and
// slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtier {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kPlanesMax = 65536;

using Numbers = std::span<const std::uint32_t>;

// The fragment of block b has `fragment_bytes` bytes and begins at base + b * block_stride.
struct Plane {
    std::uint64_t base;
    std::uint64_t block_stride;
    std::uint64_t fragment_bytes;
};

// The memory in which planes have to lie, and what messages call it and the planes' bases.
struct Room {
    std::uint64_t bytes;
    const char* bases;
    const char* name;
};

// Bytes of a block in a slot, which is the sum of its fragments. Throws unless every fragment of every block lies in the
// room and, within each plane, no two blocks' fragments overlap.
std::uint64_t check_planes(const std::vector<Plane>& planes, std::uint64_t num_blocks, const Room& room);

// Throws unless there is one slot for each block and every block id is below num_blocks.
void check_blocks(Numbers block_ids, Numbers slots, std::uint64_t num_blocks);

// Throws unless every slot lies in the pool, behind the pool's first page.
void check_slots(Numbers slots, std::uint64_t slot_bytes, std::uint64_t pool_bytes);

constexpr std::uint64_t pages_of(std::uint64_t slot_bytes) { return slot_bytes / kPageBytes + (slot_bytes % kPageBytes != 0); }

// The numbers in rising order, each as number << 32 | position. Equal numbers are in the order of their positions.
std::vector<std::uint64_t> sorted_with_positions(Numbers numbers);

// The same, but throws if two of them are less than `distance` apart, unless they are equal and that is allowed. `name` is
// the argument, and `why` says what is wrong with it.
std::vector<std::uint64_t> require_apart(Numbers numbers, std::uint64_t distance, const char* name, const char* why,
                                         bool equal_allowed = false);

}  // namespace kvtier
