#include "copy_plan.hpp"

#include <algorithm>
#include <array>
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
    StreamCopier copier(ops_);
    if (checksums != nullptr) return gather_summed(block_ids, pool, slots, checksums, copier);
    for (std::size_t i = 0; i < block_ids.size(); ++i) {
        std::byte* to = pool.data + std::uint64_t{slots[i]} * kPageBytes;
        for (const Plane& plane : planes_) {
            copier.add(to, mapping_ + plane.base_offset + block_ids[i] * plane.block_stride, plane.fragment_bytes);
            to += plane.fragment_bytes;
        }
    }
    copier.finish();
}

// A group of pieces is copied, and then read again for the checksums while it is still in the cache: the copy knows how to
// wait for eight places in memory at once, the checksum only for one. Should the engine write in between, the checksum does
// not fit, and the block is never loaded.
void CopyPlan::gather_summed(Numbers block_ids, Pool pool, Numbers slots, std::uint64_t* checksums,
                             StreamCopier& copier) const {
    struct Copied {
        const std::byte* from;
        std::size_t bytes;
        bool ends_block;
    };
    std::array<Copied, kStreams> group;
    std::size_t count = 0;
    Checksum checksum;
    const auto sum_group = [&] {
        copier.drain();
        for (std::size_t k = 0; k < count; ++k) {
            checksum.update(group[k].from, group[k].bytes);
            if (!group[k].ends_block) continue;
            *checksums++ = checksum.digest();
            checksum.reset();
        }
        count = 0;
    };
    for (std::size_t i = 0; i < block_ids.size(); ++i) {
        std::byte* to = pool.data + std::uint64_t{slots[i]} * kPageBytes;
        for (const Plane& plane : planes_) {
            const std::byte* const from = mapping_ + plane.base_offset + block_ids[i] * plane.block_stride;
            for (std::uint64_t done = 0; done < plane.fragment_bytes; done += kPieceBytes) {
                const std::uint64_t bytes = std::min<std::uint64_t>(kPieceBytes, plane.fragment_bytes - done);
                copier.add(to + done, from + done, bytes);
                group[count++] = {from + done, bytes, &plane == &planes_.back() && done + bytes == plane.fragment_bytes};
                if (count == kStreams) sum_group();
            }
            to += plane.fragment_bytes;
        }
    }
    sum_group();
    copier.finish();
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
