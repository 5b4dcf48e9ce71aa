// What the copies of both kinds of memory share: planes of fragments, and the checks of everything that names blocks and
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

// Fragment of block b: `fragment_bytes` from base + b * block_stride on.
struct Plane {
    std::uint64_t base;
    std::uint64_t block_stride;
    std::uint64_t fragment_bytes;
};

// Where planes lie: what their bases are called, and what they must not leave.
struct Room {
    std::uint64_t bytes;
    const char* bases;
    const char* name;
};

// Bytes of a block in a slot: the sum of its fragments. Throws unless every fragment of every block lies in the room and,
// plane by plane, no two blocks' fragments overlap.
std::uint64_t check_planes(const std::vector<Plane>& planes, std::uint64_t num_blocks, const Room& room);

// Throws unless there is one slot for each block and every block id is below num_blocks.
void check_blocks(Numbers block_ids, Numbers slots, std::uint64_t num_blocks);

// Throws unless every slot lies in the pool behind its first page.
void check_slots(Numbers slots, std::uint64_t slot_bytes, std::uint64_t pool_bytes);

constexpr std::uint64_t pages_of(std::uint64_t slot_bytes) { return slot_bytes / kPageBytes + (slot_bytes % kPageBytes != 0); }

// The numbers in rising order, each as number << 32 | position; equal ones in the order of their positions.
std::vector<std::uint64_t> sorted_with_positions(Numbers numbers);

// The same; throws if two of them are less than `distance` apart, except equal ones where these are allowed. `name` is the
// argument, `why` what is wrong with it.
std::vector<std::uint64_t> require_apart(Numbers numbers, std::uint64_t distance, const char* name, const char* why,
                                         bool equal_allowed = false);

}  // namespace kvtier
