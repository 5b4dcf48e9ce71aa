// Where the fragments of an engine's blocks lie in its mapping, checked once, and the copies between them and slots of the
// pool. A slot holds a block's fragments one after the other, in the order of the planes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "block_planes.hpp"
#include "stream_copy.hpp"

namespace kvtier {

struct Pool {
    std::byte* data;
    std::size_t bytes;
};

class CopyPlan {
   public:
    // The mapping must outlive this object. Throws unless every fragment of every block lies inside it and, within each plane,
    // no two blocks' fragments overlap.
    CopyPlan(std::byte* mapping, std::size_t mapping_bytes, std::vector<Plane> planes, std::uint64_t num_blocks,
             const StreamOps& ops = *stream_variants().front());

    std::uint64_t slot_bytes() const { return slot_bytes_; }
    std::uint64_t num_blocks() const { return num_blocks_; }
    std::size_t planes() const { return planes_.size(); }

    // Copies blocks to slots. If `checksums` is not null, it receives xxh3_64 of each slot's new bytes.
    void gather(Numbers block_ids, Pool pool, Numbers slots, std::uint64_t* checksums) const;
    // Copies slots to blocks. The pool is only read.
    void scatter(Numbers block_ids, Pool pool, Numbers slots) const;
    // The offset of the first page of the blocks for which the file `fd`, whose beginning is the mapping, has no data; none if
    // it has data everywhere. A page that was reserved and never written has none. Any file that is not a plain memfd is taken
    // to have none, because only tmpfs can say. Moves the file offset of `fd`.
    std::optional<std::uint64_t> first_hole(Numbers block_ids, int fd) const;
    // xxh3_64 of each slot's bytes.
    void checksums(Pool pool, Numbers slots, std::uint64_t* out) const;

   private:
    void check(Numbers block_ids, Pool pool, Numbers slots) const;

    std::byte* mapping_;
    std::size_t mapping_bytes_;
    std::vector<Plane> planes_;
    std::uint64_t num_blocks_;
    const StreamOps& ops_;
    std::uint64_t slot_bytes_;
    bool whole_lines_ = true;  // every fragment consists of whole cache lines, and enough of them to be streamed
};

}  // namespace kvtier
