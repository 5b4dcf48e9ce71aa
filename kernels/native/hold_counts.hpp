// Counts how many holders each entry of a block table has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lazy_array.hpp"
#include "refuse.hpp"

namespace kvtier {

// It has one writer. A call that throws has changed nothing.
class HoldCounts {
   public:
    explicit HoldCounts(std::size_t capacity) : counts_(capacity, false) {}

    // Counts one more holder for each occurrence of an entry. Returns how many entries had none before.
    std::size_t add(std::span<const std::uint32_t> entries) {
        check(entries);
        std::size_t fresh = 0;
        for (const std::uint32_t entry : entries) fresh += counts_[entry]++ == 0;
        return fresh;
    }

    // Undoes an `add` of the same entries. Returns how many entries have none now.
    std::size_t remove(std::span<const std::uint32_t> entries) {
        check(entries);
        std::size_t gone = 0;
        for (std::size_t i = 0; i < entries.size(); ++i) {
            if (counts_[entries[i]] == 0) {
                for (const std::uint32_t before : entries.first(i)) ++counts_[before];
                refuse("entries[", i, "] is ", entries[i], "; nobody holds it");
            }
            gone += --counts_[entries[i]] == 0;
        }
        return gone;
    }

    std::uint32_t operator[](std::uint32_t entry) const { return counts_[entry]; }

    void check(std::span<const std::uint32_t> entries) const {
        for (std::size_t i = 0; i < entries.size(); ++i)
            if (entries[i] >= counts_.size()) refuse("entries[", i, "] is ", entries[i], "; there are ", counts_.size());
    }

   private:
    LazyArray<std::uint32_t> counts_;
};

}  // namespace kvtier
