// An open-addressing index from the 32-bit tag of a key to its entry. The caller compares the whole key.
//
// It is small at first and grows with what it holds, because a table may have room for a million times as many entries as it
// will get: one page of 2 MiB for each of its first entries would be a gigabyte for a thousand of them. While it grows, there
// are two arrays, and each insertion moves some entries from the older one to the newer one, so that no call takes long.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "lazy_array.hpp"

namespace kvtier {

constexpr std::uint32_t kNoEntry = 0xffffffffu;

class KeyIndex {
   public:
    explicit KeyIndex(std::size_t capacity)
        : most_(std::bit_ceil(std::max(kFewest, capacity + capacity / 3 + 1))), slots_(kFewest) {}

    void prefetch(std::uint32_t tag) const { of(tag).prefetch(tag); }

    // The first entry with this tag, whatever its key, so that it can be prefetched. kNoEntry if there is none.
    std::uint32_t candidate(std::uint32_t tag) const {
        return of(tag).find(tag, [](std::uint32_t) { return true; });
    }

    // The entry with this tag for which `same(entry)` holds; kNoEntry if there is none.
    template <class Same>
    std::uint32_t find(std::uint32_t tag, Same same) const {
        return of(tag).find(tag, same);
    }

    // Makes room for n more entries, so that inserting them allocates nothing. May throw bad_alloc, and has changed nothing then.
    void reserve(std::size_t n) {
        if (count_ + n <= slots_.size() / 2 || slots_.size() == most_) return;
        Slots larger(std::min(most_, std::bit_ceil(2 * (count_ + n))));
        while (older_) move_some();
        if (count_ != 0) older_.emplace(std::move(slots_));
        slots_ = std::move(larger);
        from_ = older_ ? older_->first_empty() : 0;
        moved_ = 0;
    }

    // The pair must not be there yet, and the index must have fewer entries than its capacity.
    void insert(std::uint32_t tag, std::uint32_t entry) {
        reserve(1);
        if (older_) move_some();
        of(tag).insert(packed(tag, entry));
        ++count_;
    }

    // The pair must be there.
    void erase(std::uint32_t tag, std::uint32_t entry) {
        of(tag).erase(packed(tag, entry));
        --count_;
    }

    // Calls visit(tag, entry) for every pair.
    template <class Visit>
    void each(Visit visit) const {
        slots_.each(visit);
        if (older_) older_->each(visit);
    }

    std::size_t bytes() const { return slots_.bytes() + (older_ ? older_->bytes() : 0); }

   private:
    static constexpr std::size_t kFewest = 16;  // slots at the start
    static constexpr std::size_t kMoved = 16;   // slots of the older array that are gone through for each insertion

    static std::uint64_t packed(std::uint32_t tag, std::uint32_t entry) {
        return static_cast<std::uint64_t>(tag) << 32 | (std::uint64_t{entry} + 1);  // 0 is an empty slot
    }
    static std::uint32_t tag_of(std::uint64_t slot) { return static_cast<std::uint32_t>(slot >> 32); }
    static std::uint32_t entry_of(std::uint64_t slot) { return static_cast<std::uint32_t>(slot) - 1; }

    // Linear probing, eight slots per cache line, at most three quarters full, and without tombstones. The home position is the
    // tag's top bits: moving and deleting never touch the entries, and a larger array has its entries in the same order.
    class Slots {
       public:
        explicit Slots(std::size_t size)
            : slots_(size, true), mask_(size - 1), shift_(static_cast<unsigned>(32 - std::countr_zero(size))) {}

        std::size_t home(std::uint32_t tag) const { return tag >> shift_; }
        void prefetch(std::uint32_t tag) const { __builtin_prefetch(&slots_[home(tag)]); }

        template <class Same>
        std::uint32_t find(std::uint32_t tag, Same same) const {
            for (std::size_t i = home(tag);; i = (i + 1) & mask_) {
                if (slots_[i] == 0) return kNoEntry;
                if (tag_of(slots_[i]) == tag && same(entry_of(slots_[i]))) return entry_of(slots_[i]);
            }
        }

        void insert(std::uint64_t slot) {
            std::size_t i = home(tag_of(slot));
            while (slots_[i] != 0) i = (i + 1) & mask_;
            slots_[i] = slot;
        }

        // Later slots of the run move up where that brings them closer to their home.
        void erase(std::uint64_t slot) {
            std::size_t hole = home(tag_of(slot));
            while (slots_[hole] != slot) hole = (hole + 1) & mask_;
            for (std::size_t i = (hole + 1) & mask_; slots_[i] != 0; i = (i + 1) & mask_) {
                const std::size_t distance = (i - home(tag_of(slots_[i]))) & mask_;
                if (distance >= ((i - hole) & mask_)) {
                    slots_[hole] = slots_[i];
                    hole = i;
                }
            }
            slots_[hole] = 0;
        }

        template <class Visit>
        void each(Visit visit) const {
            for (std::size_t i = 0; i <= mask_; ++i)
                if (slots_[i] != 0) visit(tag_of(slots_[i]), entry_of(slots_[i]));
        }

        std::size_t first_empty() const {
            std::size_t i = 0;
            while (slots_[i] != 0) ++i;
            return i;
        }
        // Empties a slot and returns what it held.
        std::uint64_t take(std::size_t i) { return std::exchange(slots_[i & mask_], 0); }
        // How far a position is from another one, upwards and around the end.
        std::size_t distance(std::size_t from, std::size_t to) const { return (to - from) & mask_; }
        std::size_t size() const { return mask_ + 1; }
        std::size_t bytes() const { return slots_.bytes(); }

       private:
        LazyArray<std::uint64_t> slots_;
        std::size_t mask_;
        unsigned shift_;
    };

    // The array that has this tag, or would get it.
    const Slots& of(std::uint32_t tag) const {
        return older_ && older_->distance(from_, older_->home(tag)) >= moved_ ? *older_ : slots_;
    }
    Slots& of(std::uint32_t tag) { return const_cast<Slots&>(std::as_const(*this).of(tag)); }

    // Moves some runs of the older array whole. Begun at an empty slot and ended after one, a move leaves no run in two, and
    // what is found or inserted by a home that was not reached yet never has to look at a slot that was emptied.
    void move_some() {
        const std::size_t enough = moved_ + kMoved;
        for (;; ++moved_) {
            const std::uint64_t slot = older_->take(from_ + moved_);
            if (slot != 0) {
                slots_.insert(slot);
            } else if (moved_ >= older_->size()) {  // the last run may go on around the end
                older_.reset();
                return;
            } else if (moved_ >= enough) {
                return;
            }
        }
    }

    std::size_t most_;  // slots
    std::size_t count_ = 0;
    Slots slots_;
    std::optional<Slots> older_;  // while entries are moved
    std::size_t from_ = 0;        // where moving began in it
    std::size_t moved_ = 0;       // how many of its slots from there on are empty for good
};

}  // namespace kvtier
