// A cache of some size that goes by reuse as ReuseOrder does it, in little: what is learnt, and the class of each block, are
// those of the order of the pool itself, since they do not depend on what a cache has. Worth is rounded to a sixteenth of
// a power of two, and that of blocks that are not asked for is looked at from time to time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "key_index.hpp"
#include "reuse_order.hpp"

namespace kvtier {

// A block of a prompt, as the pool's order knows it.
struct ShadowBlock {
    std::uint64_t key;
    std::uint16_t of_class;
};

class ReuseShadow {
   public:
    // Has room for so many blocks.
    explicit ReuseShadow(std::size_t blocks) : nodes_(blocks), index_(blocks) {
        index_.reserve(blocks);
        clear();
    }

    void clear();
    // What does not fit any more goes.
    void resize(double limit, const ReuseOrder& order);

    // A prompt is asked for, some of whose blocks these are, in their order. Those that are not there are taken, as long as
    // each is worth more than what goes for it. Returns how many of the first ones were there.
    std::size_t asked(const ReuseOrder& order, std::span<const ShadowBlock> prompt, std::uint64_t block_bytes);
    // Blocks are stored that nobody has asked for. They are taken in the same way.
    void stored(const ReuseOrder& order, std::span<const ShadowBlock> blocks, std::uint64_t block_bytes);

    std::size_t room() const { return nodes_.size() - count_; }
    std::size_t size() const { return count_; }
    // Forgets all blocks for whose key this does not hold. The others move together, so that all are looked at as often.
    template <class Stays>
    void keep(Stays stays) {
        std::vector<std::uint32_t> place(used_, kNoEntry);
        std::uint32_t kept = 0;
        for (std::uint32_t id = 0; id < used_; ++id)
            if (nodes_[id].live && stays(nodes_[id].key)) place[id] = kept++;
        for (std::uint32_t id = 0; id < used_; ++id) {
            std::uint32_t& parent = nodes_[id].parent;
            if (place[id] != kNoEntry)
                while (parent != kNoEntry && place[parent] == kNoEntry) parent = nodes_[parent].parent;
        }
        move_together(place);
    }
    std::size_t bytes() const { return nodes_.capacity() * sizeof(Node) + index_.bytes(); }

   private:
    static constexpr std::uint32_t kBuckets = 768, kNowhere = kBuckets;
    struct Node {
        std::uint64_t key;
        std::uint64_t bytes;
        std::uint32_t parent;  // the nearest block before it that was chosen; it is there as long as this one
        std::uint32_t children;
        std::uint32_t before, after;  // in its bucket; of a free one, `after` is the next free one
        std::uint32_t touched;
        std::uint16_t of_class;
        std::uint16_t bucket;  // kNowhere if it has children
        bool live;
    };

    static std::uint32_t tag(std::uint64_t key) { return static_cast<std::uint32_t>(key >> 32); }
    static std::uint32_t bucket_of(float worth);
    std::uint32_t find(std::uint64_t key) const {
        return index_.find(tag(key), [&](std::uint32_t id) { return nodes_[id].key == key; });
    }
    float worth(const ReuseOrder& order, std::uint32_t id) const {
        return order.worth(nodes_[id].of_class, order.now() - nodes_[id].touched);
    }
    void take_in(const ReuseOrder& order, std::span<const ShadowBlock> blocks, std::uint64_t block_bytes, std::uint32_t last);
    bool make_room(const ReuseOrder& order, std::uint64_t block_bytes, float worth_of_new);
    std::uint32_t victim(const ReuseOrder& order);
    void look_at_some(const ReuseOrder& order, std::size_t n);
    void into_bucket(std::uint32_t id, std::uint32_t bucket);
    void out_of_bucket(std::uint32_t id);
    void rank_anew(const ReuseOrder& order, std::uint32_t id);
    void leave_parent(std::uint32_t id);
    void erase(std::uint32_t id);
    void move_together(std::span<const std::uint32_t> place);
    std::uint32_t add(const Node& node);

    std::vector<Node> nodes_;
    KeyIndex index_;
    std::uint32_t free_ = kNoEntry, used_ = 0, looked_at_ = 0;
    std::size_t count_ = 0;
    double limit_ = 0, held_ = 0;
    // Blocks without children, by what they are worth, in the order in which they came to it.
    std::array<std::uint32_t, kBuckets> first_, last_;
    std::array<std::uint64_t, kBuckets / 64> filled_;
    std::vector<std::uint32_t> found_;
};

}  // namespace kvtier
