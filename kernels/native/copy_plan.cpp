#include "copy_plan.hpp"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <utility>

#include "checksum.hpp"
#include "refuse.hpp"

namespace kvtier {

CopyPlan::CopyPlan(std::byte* mapping, std::size_t mapping_bytes, std::vector<Plane> planes, std::uint64_t num_blocks,
                   const StreamOps& ops)
    : mapping_(mapping),
      mapping_bytes_(mapping_bytes),
      planes_(std::move(planes)),
      num_blocks_(num_blocks),
      ops_(ops),
      slot_bytes_(check_planes(planes_, num_blocks, {mapping_bytes, "base_offsets", "mapping"})) {
    for (const Plane& plane : planes_)
        whole_lines_ &= plane.fragment_bytes % kLineBytes == 0 && plane.fragment_bytes >= kStreamBytesMin;
}

void CopyPlan::check(Numbers block_ids, Pool pool, Numbers slots) const {
    check_blocks(block_ids, slots, num_blocks_);
    check_slots(slots, slot_bytes_, pool.bytes);
    if (pool.data < mapping_ + mapping_bytes_ && mapping_ < pool.data + pool.bytes)
        refuse("pool overlaps the engine's mapping");
}

void CopyPlan::gather(Numbers block_ids, Pool pool, Numbers slots, std::uint64_t* checksums) const {
    check(block_ids, pool, slots);
    require_apart(slots, pages_of(slot_bytes_), "slots", "overlaps");
    // A checksum waits for one place in memory at a time, and the copy for eight. So the copy comes first, and the checksum
    // reads its source, which the copy has left in the cache. If the engine writes to a block between the two, which no engine
    // may do while it stores the block, the checksum is not that of the slot's bytes. That shows where the two are compared:
    // before a load that verifies the block, in a sample, and when the block has come back from a disk.
    Checksum checksum;
    std::uint64_t summed_bytes = 0;
    const auto sum = [&](const Piece* pieces, std::size_t count) {
        for (std::size_t k = 0; k < count; ++k) {
            checksum.update(pieces[k].from, pieces[k].bytes);
            summed_bytes += pieces[k].bytes;
            if (summed_bytes < slot_bytes_) continue;
            *checksums++ = checksum.digest();
            checksum.reset();
            summed_bytes = 0;
        }
    };
    // For other fragments, or in a pool that is not aligned to lines, some bytes are in no piece.
    const bool whole = whole_lines_ && reinterpret_cast<std::uintptr_t>(pool.data) % kLineBytes == 0;
    const bool sum_pieces = checksums != nullptr && whole;
    StreamCopier copier(ops_, sum_pieces ? StreamCopier::After(sum) : StreamCopier::After());
    for (std::size_t i = 0; i < block_ids.size(); ++i) {
        std::byte* to = pool.data + std::uint64_t{slots[i]} * kPageBytes;
        for (const Plane& plane : planes_) {
            copier.add(to, mapping_ + plane.base + block_ids[i] * plane.block_stride, plane.fragment_bytes);
            to += plane.fragment_bytes;
        }
    }
    copier.finish();
    if (checksums != nullptr && !sum_pieces) this->checksums(pool, slots, checksums);
}

void CopyPlan::scatter(Numbers block_ids, Pool pool, Numbers slots) const {
    check(block_ids, pool, slots);
    require_apart(block_ids, 1, "block_ids", "repeats");
    StreamCopier copier(ops_);
    for (std::size_t i = 0; i < block_ids.size(); ++i) {
        const std::byte* from = pool.data + std::uint64_t{slots[i]} * kPageBytes;
        for (const Plane& plane : planes_) {
            copier.add(mapping_ + plane.base + block_ids[i] * plane.block_stride, from, plane.fragment_bytes);
            from += plane.fragment_bytes;
        }
    }
    copier.finish();
}

std::optional<std::uint64_t> CopyPlan::first_hole(Numbers block_ids, int fd) const {
    check_blocks(block_ids, block_ids, num_blocks_);
    struct statfs system;
    const bool knows = fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC;
    for (const std::uint32_t id : block_ids) {
        for (const Plane& plane : planes_) {
            const std::uint64_t begin = plane.base + id * plane.block_stride;
            // One page at a time: SEEK_HOLE would say it at once for a fragment, but looks at all the data behind it.
            for (std::uint64_t page = begin / kPageBytes * kPageBytes; page < begin + plane.fragment_bytes; page += kPageBytes)
                if (!knows || lseek(fd, static_cast<off_t>(page), SEEK_DATA) != static_cast<off_t>(page)) return page;
        }
    }
    return std::nullopt;
}

void CopyPlan::checksums(Pool pool, Numbers slots, std::uint64_t* out) const {
    check_slots(slots, slot_bytes_, pool.bytes);
    for (std::size_t i = 0; i < slots.size(); ++i)
        out[i] = xxh3_64(pool.data + std::uint64_t{slots[i]} * kPageBytes, slot_bytes_);
}

}  // namespace kvtier
