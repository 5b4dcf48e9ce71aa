// Three caches of different sizes that go by recency, as one list: what is in the smallest is in all of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "key_index.hpp"

namespace kvtier {

constexpr unsigned kShadowSizes = 3;

class RecencyShadow {
   public:
    // Has room for so many blocks.
    explicit RecencyShadow(std::size_t blocks) : nodes_(blocks), index_(blocks) {
        index_.reserve(blocks);
        newest_.fill(kNoEntry);
        oldest_.fill(kNoEntry);
        held_.fill(0);
    }

    void clear() {
        keep([](std::uint64_t) { return false; });
    }
    // The bytes of the caches, the smallest first. What does not fit any more goes.
    void resize(const std::array<double, kShadowSizes>& limits);

    // kNoEntry if no cache has the block.
    std::uint32_t find(std::uint64_t key) const {
        return index_.find(tag(key), [&](std::uint32_t id) { return nodes_[id].key == key; });
    }
    // The smallest cache that has it.
    unsigned size_of(std::uint32_t id) const { return nodes_[id].size; }
    // It becomes the most recent. Nothing goes before settle() is called.
    void touch(std::uint32_t id);
    // The same for one that is not there. There must be room.
    void put(std::uint64_t key, std::uint64_t bytes);
    // The least recent blocks go from each cache that has too much.
    void settle();

    std::size_t room() const { return nodes_.size() - count_; }
    std::size_t size() const { return count_; }
    // Forgets all blocks for whose key this does not hold.
    template <class Stays>
    void keep(Stays stays) {
        for (unsigned size = 0; size < kShadowSizes; ++size)
            for (std::uint32_t id = newest_[size], next; id != kNoEntry; id = next) {
                next = nodes_[id].older;
                if (!stays(nodes_[id].key)) erase(id);
            }
    }
    std::size_t bytes() const { return nodes_.capacity() * sizeof(Node) + index_.bytes(); }

   private:
    struct Node {
        std::uint64_t key;
        std::uint64_t bytes;
        std::uint32_t newer, older;  // of a free one, `older` is the next free one
        std::uint32_t size;
    };
    static std::uint32_t tag(std::uint64_t key) { return static_cast<std::uint32_t>(key >> 32); }
    void unlink(std::uint32_t id);
    void link(std::uint32_t id, unsigned size);
    void link_oldest(std::uint32_t id, unsigned size);
    void erase(std::uint32_t id);

    std::vector<Node> nodes_;
    KeyIndex index_;
    std::uint32_t free_ = kNoEntry, used_ = 0;
    std::size_t count_ = 0;
    std::array<double, kShadowSizes> limits_{};
    // Of each cache, what the next smaller one does not have.
    std::array<std::uint32_t, kShadowSizes> newest_, oldest_;
    std::array<double, kShadowSizes> held_;
};

}  // namespace kvtier
