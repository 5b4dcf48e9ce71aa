// What is remembered of blocks that are not there: two generations of equal size. The older one is forgotten little by little
// while the second half of the newer one fills, so that no call takes long.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lazy_array.hpp"

namespace kvtier {

// A block that was asked for.
struct Remembered {
    std::uint64_t key;
    std::uint32_t touched;
    std::uint16_t of_class;
    std::uint8_t touches;  // 0: it is not to be found here any more
    std::uint8_t gap;
};
static_assert(sizeof(Remembered) == 16);

class ReuseHistory {
   public:
    // Remembers at least so many blocks, and at most twice as many.
    explicit ReuseHistory(std::size_t blocks)
        : limit_(blocks < 8 ? 8 : blocks), newer_(std::make_unique<Generation>(limit_)), older_(std::make_unique<Generation>(limit_)) {}

    // The block with this key; nullptr if it is not remembered. It stays where it is until the next put().
    Remembered* find(std::uint64_t key) {
        if (Remembered* const found = newer_->find(key); found != nullptr) return found;
        return older_->find(key);
    }

    // Remembers a block that is not. Where others are forgotten for it, forget(block) is called for each.
    template <class Forget>
    void put(const Remembered& block, Forget forget) {
        if (Remembered* const place = newer_->place_of(block.key); place != nullptr) {
            *place = block;
            return;
        }
        const std::size_t room = limit_ - newer_->blocks.size();
        const std::size_t may_stay = 2 * room;  // of the older generation
        for (; older_->blocks.size() - forgotten_ > may_stay; ++forgotten_) {
            Remembered& oldest = older_->blocks[forgotten_];
            if (oldest.touches != 0) forget(oldest);
            oldest.touches = 0;
        }
        if (room == 0) {
            older_ = std::exchange(newer_, std::make_unique<Generation>(limit_));
            forgotten_ = 0;
        }
        newer_->put(block);
    }

    // All that is remembered, and what is not to be found any more, in no order.
    std::size_t size() const { return newer_->blocks.size() + older_->blocks.size(); }
    const Remembered& at(std::size_t i) const {
        const std::size_t n = newer_->blocks.size();
        return i < n ? newer_->blocks[i] : older_->blocks[i - n];
    }
    std::size_t bytes() const { return newer_->bytes() + older_->bytes(); }

   private:
    struct Generation {
        // Takes addresses for all of it now, and memory as it is filled: growing would copy it.
        explicit Generation(std::size_t limit) : places(std::bit_ceil(limit + limit / 2), false) { blocks.reserve(limit); }

        // Where a block is or was.
        Remembered* place_of(std::uint64_t key) {
            const std::size_t mask = places.size() - 1;
            for (std::size_t i = home(key); places[i] != 0; i = (i + 1) & mask)
                if (Remembered& block = blocks[places[i] - 1]; block.key == key) return &block;
            return nullptr;
        }
        Remembered* find(std::uint64_t key) {
            Remembered* const place = place_of(key);
            return place != nullptr && place->touches != 0 ? place : nullptr;
        }
        void put(const Remembered& block) {
            const std::size_t mask = places.size() - 1;
            std::size_t i = home(block.key);
            while (places[i] != 0) i = (i + 1) & mask;
            blocks.push_back(block);
            places[i] = static_cast<std::uint32_t>(blocks.size());
        }
        std::size_t home(std::uint64_t key) const { return static_cast<std::size_t>(key) & (places.size() - 1); }
        std::size_t bytes() const { return blocks.capacity() * sizeof(Remembered) + places.bytes(); }

        std::vector<Remembered> blocks;
        LazyArray<std::uint32_t> places;  // the number of a block + 1
    };

    std::size_t limit_;
    std::size_t forgotten_ = 0;  // of the older generation, from its first on
    std::unique_ptr<Generation> newer_, older_;
};

}  // namespace kvtier
