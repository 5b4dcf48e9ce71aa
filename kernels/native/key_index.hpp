// An open-addressing index from the 32-bit tag of a key to its entry, with linear probing, eight slots per cache line, at
// most three quarters full, and without tombstones. The home position is the tag's top bits, so moving and deleting never
// touch the entries. The caller compares the whole key.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "lazy_array.hpp"

namespace kvtier {

constexpr std::uint32_t kNoEntry = 0xffffffffu;

class KeyIndex {
   public:
    explicit KeyIndex(std::size_t capacity)
        : slots_(std::bit_ceil(capacity + capacity / 3 + 1 < 16 ? std::size_t{16} : capacity + capacity / 3 + 1), true),
          mask_(slots_.size() - 1),
          shift_(static_cast<unsigned>(32 - std::countr_zero(slots_.size()))) {}

    void prefetch(std::uint32_t tag) const { __builtin_prefetch(&slots_[home(tag)]); }

    // The first entry with this tag, whatever its key, so that it can be prefetched. kNoEntry if there is none.
    std::uint32_t candidate(std::uint32_t tag) const {
        for (std::size_t i = home(tag);; i = (i + 1) & mask_) {
            if (slots_[i] == 0) return kNoEntry;
            if (tag_of(slots_[i]) == tag) return entry_of(slots_[i]);
        }
    }

    // The entry with this tag for which `same(entry)` holds; kNoEntry if there is none.
    template <class Same>
    std::uint32_t find(std::uint32_t tag, Same same) const {
        for (std::size_t i = home(tag);; i = (i + 1) & mask_) {
            if (slots_[i] == 0) return kNoEntry;
            if (tag_of(slots_[i]) == tag && same(entry_of(slots_[i]))) return entry_of(slots_[i]);
        }
    }

    // The pair must not be there yet, and the index must have fewer entries than its capacity.
    void insert(std::uint32_t tag, std::uint32_t entry) {
        std::size_t i = home(tag);
        while (slots_[i] != 0) i = (i + 1) & mask_;
        slots_[i] = static_cast<std::uint64_t>(tag) << 32 | (std::uint64_t{entry} + 1);
    }

    // The pair must be there. Later slots of the run move up where that brings them closer to their home.
    void erase(std::uint32_t tag, std::uint32_t entry) {
        const std::uint64_t wanted = static_cast<std::uint64_t>(tag) << 32 | (std::uint64_t{entry} + 1);
        std::size_t hole = home(tag);
        while (slots_[hole] != wanted) hole = (hole + 1) & mask_;
        for (std::size_t i = (hole + 1) & mask_; slots_[i] != 0; i = (i + 1) & mask_) {
            const std::size_t distance = (i - home(tag_of(slots_[i]))) & mask_;
            if (distance >= ((i - hole) & mask_)) {
                slots_[hole] = slots_[i];
                hole = i;
            }
        }
        slots_[hole] = 0;
    }

    // Calls visit(tag, entry) for every pair.
    template <class Visit>
    void each(Visit visit) const {
        for (std::size_t i = 0; i <= mask_; ++i)
            if (slots_[i] != 0) visit(tag_of(slots_[i]), entry_of(slots_[i]));
    }

    std::size_t bytes() const { return slots_.bytes(); }

   private:
    static std::uint32_t tag_of(std::uint64_t slot) { return static_cast<std::uint32_t>(slot >> 32); }
    static std::uint32_t entry_of(std::uint64_t slot) { return static_cast<std::uint32_t>(slot) - 1; }
    std::size_t home(std::uint32_t tag) const { return tag >> shift_; }

    LazyArray<std::uint64_t> slots_;  // tag << 32 | entry + 1; 0 is empty
    std::size_t mask_;
    unsigned shift_;
};

}  // namespace kvtier
