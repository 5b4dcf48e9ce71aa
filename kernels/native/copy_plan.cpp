#include "copy_plan.hpp"

#include <algorithm>
#include <utility>

#include "checksum.hpp"
#include "refuse.hpp"

namespace kvtier {

namespace {

bool add_overflows(std::uint64_t a, std::uint64_t b, std::uint64_t* sum) { return __builtin_add_overflow(a, b, sum); }
bool multiply_overflows(std::uint64_t a, std::uint64_t b, std::uint64_t* product) {
    return __builtin_mul_overflow(a, b, product);
}

// Throws if two of `numbers` are less than `distance` apart; `name` is the argument, `why` what is wrong with it.
void require_apart(CopyPlan::Numbers numbers, std::uint64_t distance, const char* name, const char* why) {
    std::vector<std::uint32_t> sorted(numbers.begin(), numbers.end());
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 1; i < sorted.size(); ++i)
        if (sorted[i] - sorted[i - 1] < distance) {
            const auto position = [&](std::uint32_t number, std::ptrdiff_t skip) {
                const auto first = std::find(numbers.begin(), numbers.end(), number);
                return std::find(skip == 0 ? first : first + skip, numbers.end(), number) - numbers.begin();
            };
            const bool equal = sorted[i] == sorted[i - 1];
            refuse(name, "[", position(sorted[i], equal ? 1 : 0), "] is ", sorted[i], ", which ", why, " ", name, "[",
                   position(sorted[i - 1], 0), "], ", sorted[i - 1]);
        }
}

}  // namespace

CopyPlan::CopyPlan(std::byte* mapping, std::size_t mapping_bytes, std::vector<Plane> planes, std::uint64_t num_blocks,
                   const StreamOps& ops)
    : mapping_(mapping),
      mapping_bytes_(mapping_bytes),
      planes_(std::move(planes)),
      num_blocks_(num_blocks),
      ops_(ops) {
    if (planes_.empty() || planes_.size() > kPlanesMax)
        refuse("base_offsets names ", planes_.size(), " planes; expected 1 to ", kPlanesMax);
    if (num_blocks == 0 || num_blocks > std::uint64_t{1} << 32)
        refuse("num_blocks is ", num_blocks, "; expected 1 to 2^32");
    for (std::size_t p = 0; p < planes_.size(); ++p) {
        const Plane& plane = planes_[p];
        if (plane.fragment_bytes == 0) refuse("fragment_bytes[", p, "] is 0");
        if (plane.base_offset > mapping_bytes)
            refuse("base_offsets[", p, "] is ", plane.base_offset, ", beyond the mapping of ", mapping_bytes, " bytes");
        if (num_blocks > 1 && plane.block_stride < plane.fragment_bytes)
            refuse("block_strides[", p, "] is ", plane.block_stride, ", less than fragment_bytes[", p, "], ",
                   plane.fragment_bytes, ": the blocks would overlap");
        std::uint64_t end = 0;
        if (multiply_overflows(plane.block_stride, num_blocks - 1, &end) || add_overflows(end, plane.base_offset, &end) ||
            end > mapping_bytes)
            refuse("block_strides[", p, "] is ", plane.block_stride, ": block ", num_blocks - 1,
                   " would begin beyond the mapping of ", mapping_bytes, " bytes");
        if (add_overflows(end, plane.fragment_bytes, &end) || end > mapping_bytes)
            refuse("fragment_bytes[", p, "] is ", plane.fragment_bytes, ": block ", num_blocks - 1,
                   " would end beyond the mapping of ", mapping_bytes, " bytes");
        // Each fragment fits into the mapping and there are at most 2^16: no overflow below mappings of 2^48 bytes, the
        // largest there are; checked all the same.
        if (add_overflows(slot_bytes_, plane.fragment_bytes, &slot_bytes_))
            refuse("fragment_bytes[", p, "] is ", plane.fragment_bytes, ": a slot would have more than 2^64 bytes");
        whole_lines_ &= plane.fragment_bytes % kLineBytes == 0 && plane.fragment_bytes >= kStreamBytesMin;
    }
}

void CopyPlan::check_slots(Pool pool, Numbers slots) const {
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::uint64_t start = std::uint64_t{slots[i]} * kPageBytes;
        if (slots[i] == 0 || start > pool.bytes || slot_bytes_ > pool.bytes - start)
            refuse("slots[", i, "] is ", slots[i], ": a slot of ", slot_bytes_, " bytes is not inside the pool of ",
                   pool.bytes, " bytes");
    }
}

void CopyPlan::check_blocks(Numbers block_ids, Numbers slots, Pool pool) const {
    if (slots.size() != block_ids.size())
        refuse("slots has ", slots.size(), " elements; expected ", block_ids.size(), ", one for each of block_ids");
    for (std::size_t i = 0; i < block_ids.size(); ++i)
        if (block_ids[i] >= num_blocks_)
            refuse("block_ids[", i, "] is ", block_ids[i], "; the engine has ", num_blocks_, " blocks");
    check_slots(pool, slots);
    if (pool.data < mapping_ + mapping_bytes_ && mapping_ < pool.data + pool.bytes)
        refuse("pool overlaps the engine's mapping");
}

void CopyPlan::gather(Numbers block_ids, Pool pool, Numbers slots, std::uint64_t* checksums) const {
    check_blocks(block_ids, slots, pool);
    require_apart(slots, (slot_bytes_ + kPageBytes - 1) / kPageBytes, "slots", "overlaps");
    // A checksum can wait for one place in memory at a time, the copy for eight: so the copy comes first, and the checksum
    // reads what it has left in the cache. Should the engine write in between, the checksum does not fit, and the block is
    // never loaded.
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
    // Of other fragments, or in a pool that is not aligned to lines, the pieces are not all there is.
    const bool whole = whole_lines_ && reinterpret_cast<std::uintptr_t>(pool.data) % kLineBytes == 0;
    const bool sum_pieces = checksums != nullptr && whole;
    StreamCopier copier(ops_, sum_pieces ? StreamCopier::After(sum) : StreamCopier::After());
    for (std::size_t i = 0; i < block_ids.size(); ++i) {
        std::byte* to = pool.data + std::uint64_t{slots[i]} * kPageBytes;
        for (const Plane& plane : planes_) {
            copier.add(to, mapping_ + plane.base_offset + block_ids[i] * plane.block_stride, plane.fragment_bytes);
            to += plane.fragment_bytes;
        }
    }
    copier.finish();
    if (checksums != nullptr && !sum_pieces) this->checksums(pool, slots, checksums);
}

void CopyPlan::scatter(Numbers block_ids, Pool pool, Numbers slots) const {
    check_blocks(block_ids, slots, pool);
    require_apart(block_ids, 1, "block_ids", "repeats");
    StreamCopier copier(ops_);
    for (std::size_t i = 0; i < block_ids.size(); ++i) {
        const std::byte* from = pool.data + std::uint64_t{slots[i]} * kPageBytes;
        for (const Plane& plane : planes_) {
            copier.add(mapping_ + plane.base_offset + block_ids[i] * plane.block_stride, from, plane.fragment_bytes);
            from += plane.fragment_bytes;
        }
    }
    copier.finish();
}

void CopyPlan::checksums(Pool pool, Numbers slots, std::uint64_t* out) const {
    check_slots(pool, slots);
    for (std::size_t i = 0; i < slots.size(); ++i)
        out[i] = xxh3_64(pool.data + std::uint64_t{slots[i]} * kPageBytes, slot_bytes_);
}

}  // namespace kvtier
