// What is remembered of blocks that are not there: two generations of equal size, of which the older one is forgotten as a
// whole when the newer one is full.
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

    // Remembers a block that is not. If there is no room, the older generation goes, and forget(block) is called for each of
    // it.
    template <class Forget>
    void put(const Remembered& block, Forget forget) {
        if (Remembered* const place = newer_->place_of(block.key); place != nullptr) {
            *place = block;
            return;
        }
        if (newer_->blocks.size() == limit_) {
            for (const Remembered& each : older_->blocks)
                if (each.touches != 0) forget(each);
            older_ = std::exchange(newer_, std::make_unique<Generation>(limit_));
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
        explicit Generation(std::size_t limit) : places(std::bit_ceil(limit + limit / 2), false) {}

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
    std::unique_ptr<Generation> newer_, older_;
};

}  // namespace kvtier
