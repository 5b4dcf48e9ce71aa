// Which slots of the pool a block has, in shard order, and which block a slot belongs to.
//
// It is a chained hash table of 16-byte records. Arrays indexed by page would take 8 bytes for every 4 KiB of the pool, a
// kilobyte for a block of 512 KiB. Records and buckets are reserved for the largest possible number of slots, one per page, but
// only those in use are ever touched: buckets are added one by one, each with a part of the records of another one (linear
// hashing).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "key_index.hpp"
#include "lazy_array.hpp"

namespace kvtier {

class SlotMap {
   public:
    // Records are numbered from 1; 0 is "none".
    struct Record {
        std::uint32_t slot;
        std::uint32_t next_of_entry;  // next shard of the block; for a free record, the next free one
        std::uint32_t next_of_bucket;
        std::uint32_t entry;
    };

    SlotMap(std::size_t capacity, std::size_t pool_pages)
        : records_(pool_pages, false),
          buckets_(std::max(kFewest, std::bit_ceil(capacity / 2)), true) {}

    const Record& operator[](std::uint32_t record) const { return records_[record]; }
    void prefetch(std::uint32_t slot) const { __builtin_prefetch(&buckets_[bucket(slot)]); }
    void prefetch_record(std::uint32_t record) const { __builtin_prefetch(&records_[record]); }

    // The record of a slot; 0 if nobody owns it.
    std::uint32_t find(std::uint32_t slot) const {
        std::uint32_t record = buckets_[bucket(slot)];
        while (record != 0 && records_[record].slot != slot) record = records_[record].next_of_bucket;
        return record;
    }

    // Adds a slot that nobody owns; the caller links `next_of_entry` with link().
    std::uint32_t add(std::uint32_t slot, std::uint32_t entry) {
        std::uint32_t record = free_;
        if (record != 0)
            free_ = records_[record].next_of_entry;
        else
            record = ++used_;  // always in range, because there are fewer slots than pages: page 0 is none
        std::uint32_t& head = buckets_[bucket(slot)];
        records_[record] = {slot, 0, head, entry};
        head = record;
        if (++count_ > kFilled * size_ && size_ < buckets_.size()) add_bucket();
        return record;
    }

    // Has as many buckets for so many slots as they would get one by one. A map that is not empty grows as slots come.
    void reserve(std::size_t slots) {
        if (count_ != 0 || slots <= kFilled * size_) return;
        size_ = round_ = std::min(buckets_.size(), std::bit_ceil(slots / kFilled));
    }

    void link(std::uint32_t record, std::uint32_t next) { records_[record].next_of_entry = next; }

    // Frees a block's whole chain, which starts at `record` (0: nothing).
    void remove_chain(std::uint32_t record) {
        while (record != 0) {
            Record& gone = records_[record];
            std::uint32_t* link = &buckets_[bucket(gone.slot)];
            while (*link != record) link = &records_[*link].next_of_bucket;
            *link = gone.next_of_bucket;
            const std::uint32_t next = gone.next_of_entry;
            gone = {0, free_, 0, kNoEntry};
            free_ = record;
            --count_;
            record = next;
        }
    }

    std::size_t count() const { return count_; }
    std::size_t free_count() const {
        std::size_t n = 0;
        for (std::uint32_t record = free_; record != 0 && n <= used_; record = records_[record].next_of_entry) ++n;
        return n;
    }
    std::size_t used() const { return used_; }
    // Bytes touched so far: records never move, and freed ones are reused first.
    std::size_t bytes() const { return size_ * sizeof(std::uint32_t) + used_ * sizeof(Record); }

   private:
    static constexpr std::size_t kFewest = 16;  // buckets at the start
    static constexpr std::size_t kFilled = 2;   // records of a bucket on average

    // Slots lie at regular distances; a multiplication by the golden ratio spreads such sequences evenly by the top bits of
    // the product. Reversed, these come first when buckets are divided.
    static std::size_t spread(std::uint32_t slot) {
        std::uint32_t bits = __builtin_bswap32(slot * 0x9e3779b1u);
        bits = (bits >> 4 & 0x0f0f0f0fu) | (bits & 0x0f0f0f0fu) << 4;
        bits = (bits >> 2 & 0x33333333u) | (bits & 0x33333333u) << 2;
        return (bits >> 1 & 0x55555555u) | (bits & 0x55555555u) << 1;
    }
    // The lower buckets have been divided already, and take one more bit of the slot.
    std::size_t bucket(std::uint32_t slot) const {
        const std::size_t i = spread(slot) & (2 * round_ - 1);
        return i < size_ ? i : i - round_;
    }

    void add_bucket() {
        std::uint32_t* link = &buckets_[size_ - round_];
        std::uint32_t& added = buckets_[size_++];
        while (*link != 0) {
            Record& record = records_[*link];
            if ((spread(record.slot) & round_) == 0) {
                link = &record.next_of_bucket;
            } else {
                const std::uint32_t moved = std::exchange(*link, record.next_of_bucket);
                record.next_of_bucket = std::exchange(added, moved);
            }
        }
        if (size_ == 2 * round_) round_ *= 2;
    }

    LazyArray<Record> records_;
    LazyArray<std::uint32_t> buckets_;
    std::size_t size_ = kFewest;   // buckets in use
    std::size_t round_ = kFewest;  // how many there were when this round of divisions began: a power of two
    std::uint32_t free_ = 0;
    std::uint32_t used_ = 0;
    std::size_t count_ = 0;
};

static_assert(sizeof(SlotMap::Record) == 16);

}  // namespace kvtier
