// Where the fragments of an engine's blocks lie in its mapping, checked once; and the copies between them and slots of the
// pool. A slot holds a block's fragments one after the other in the order of the planes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "stream_copy.hpp"

namespace kvtier {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kPlanesMax = 65536;

struct Plane {
    std::uint64_t base_offset;
    std::uint64_t block_stride;
    std::uint64_t fragment_bytes;
};

struct Pool {
    std::byte* data;
    std::size_t bytes;
};

class CopyPlan {
   public:
    // The mapping must outlive this object. Throws unless every fragment of every block lies inside it and, plane by plane,
    // no two blocks' fragments overlap.
    CopyPlan(std::byte* mapping, std::size_t mapping_bytes, std::vector<Plane> planes, std::uint64_t num_blocks,
             const StreamOps& ops = *stream_variants().front());

    std::uint64_t slot_bytes() const { return slot_bytes_; }
    std::uint64_t num_blocks() const { return num_blocks_; }
    std::size_t planes() const { return planes_.size(); }

    using Numbers = std::span<const std::uint32_t>;

    // Blocks to slots. If `checksums` is not null it receives xxh3_64 of each slot's new bytes.
    void gather(Numbers block_ids, Pool pool, Numbers slots, std::uint64_t* checksums) const;
    // Slots to blocks. The pool is only read.
    void scatter(Numbers block_ids, Pool pool, Numbers slots) const;
    // xxh3_64 of each slot's bytes.
    void checksums(Pool pool, Numbers slots, std::uint64_t* out) const;

   private:
    void check_blocks(Numbers block_ids, Numbers slots, Pool pool) const;
    void check_slots(Pool pool, Numbers slots) const;

    std::byte* mapping_;
    std::size_t mapping_bytes_;
    std::vector<Plane> planes_;
    std::uint64_t num_blocks_;
    const StreamOps& ops_;
    std::uint64_t slot_bytes_ = 0;
    bool whole_lines_ = true;  // every fragment consists of whole cache lines, and enough of them to be streamed
};

}  // namespace kvtier
