// Which blocks of a table are worth keeping, by what was learnt of how blocks like them come back.
//
// Blocks of a prompt are a chain, and a block without those before it is of no use. So only a block without children goes,
// the one with the lowest rank first, and of one rank the one that was asked for longest ago. New blocks are taken from the
// beginning of their prompt on, as long as each of them ranks higher than what would have to go for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "key_index.hpp"
#include "lazy_array.hpp"
#include "reuse_history.hpp"
#include "reuse_statistics.hpp"

namespace kvtier {

// What a table has learnt, and the tables below it with it.
struct ReuseLearnt {
    explicit ReuseLearnt(std::size_t history_blocks) : history(history_blocks) {}

    ReuseStatistics statistics;
    ReuseHistory history;
    std::uint32_t now = 0;  // accesses, as the time
    bool restored = false;  // it goes on with what was learnt before
};

class ReuseOrder {
   public:
    using Ids = std::span<const std::uint32_t>;

    // The blocks of a prompt in a table below, kNoEntry for those that it does not have.
    struct Below {
        ReuseOrder* order;
        std::uint16_t domain;
        std::vector<std::uint32_t> entries;
    };

    // For a table of so many entries. Remembers at least so many blocks that are not there.
    ReuseOrder(std::size_t capacity, std::size_t history_blocks);
    // For a table below: it goes by what the one above learns.
    ReuseOrder(std::size_t capacity, const ReuseOrder& above);

    // A prompt is asked for: the keys of its blocks from the first on, and their entries, kNoEntry for those without one. Those
    // that follow each other are chained. What tables below have of it is asked for there too.
    void asked(std::uint16_t domain, std::span<const std::uint64_t> keys, Ids entries, std::span<Below> below = {});
    // Each entry is the child of the one before it, unless it has a parent already.
    void chained(Ids entries, std::uint16_t domain);

    void created(std::uint32_t id, std::uint64_t key);
    // It was asked for so long ago. Only for one that has just been created.
    void aged(std::uint32_t id, std::uint32_t age) { blocks_[id].touched = learnt_->now - age; }
    // It is the same block as one of the table above. Only for one that has just been created.
    void same_as(std::uint32_t id, const ReuseOrder& above, std::uint32_t of);
    // The block before it in its prompt, kNoEntry if that is not known or not there.
    std::uint32_t parent(std::uint32_t id) const { return parent_of(blocks_[id]) == nullptr ? kNoEntry : blocks_[id].parent; }
    void removed(std::uint32_t id, std::uint64_t key, std::uint16_t domain);
    void evictable(std::uint32_t id, std::uint16_t domain);
    void unevictable(std::uint32_t id, std::uint16_t domain);
    // It goes before all others.
    void cooled(std::uint32_t id, std::uint16_t domain);

    // Up to n that go first, in this order, each as if those before it had gone.
    std::size_t victims(std::uint16_t domain, std::size_t n, std::uint32_t* out) const;
    // How many new blocks, in their order, are to be kept, if there is room for `free` of them. They are entries of the table
    // that `of` orders: this one, or the one above.
    std::size_t admitted(std::uint16_t domain, const ReuseOrder& of, Ids entries, std::size_t free) const;

    // For caches of other sizes, which learn nothing by themselves: the class of a block that was asked for, kUnknown if that is
    // not remembered, or of one that nobody has asked for; and what a block is worth at some age.
    static constexpr std::uint16_t kUnknown = 0xffff;
    std::uint16_t known_class(std::uint32_t id, std::uint64_t key) {
        if (id != kNoEntry) return class_of(id);
        const Remembered* const ghost = learnt_->history.find(key);
        return ghost != nullptr ? ghost->of_class : kUnknown;
    }
    static std::uint16_t class_of_new();
    float worth(std::uint16_t of_class, std::uint32_t age) const { return rank(of_class, ReuseStatistics::step(age)); }
    std::uint32_t now() const { return learnt_->now; }

    std::vector<std::byte> saved() const { return learnt_->statistics.saved(); }
    bool restore(std::span<const std::byte> saved) {
        const bool restored = learnt_->statistics.restore(saved);
        learnt_->restored = learnt_->restored || restored;
        return restored;
    }
    // Whether enough was learnt for a table of so many blocks to go by it: blocks were seen to come back, or not, for longer
    // than the least recent one is there. Until then, the least recent goes.
    bool decides(std::size_t live) const {
        return learnt_->restored || 2 * std::size_t{learnt_->now} >= kTurnsTimesTwo * live;
    }

    std::size_t bytes() const { return blocks_.bytes() + (below_ ? 0 : learnt_->history.bytes()); }
    // What does not fit, or an empty string. `is_evictable(id)` says what the table thinks of its `used` first entries.
    template <class IsEvictable>
    std::string check(std::size_t used, IsEvictable is_evictable) const;

   private:
    struct Block {
        std::uint32_t touched;
        std::uint32_t parent;
        std::uint32_t parent_birth;
        std::uint32_t birth;  // 0: there is no such entry
        std::uint32_t children;
        std::uint32_t left, right;  // in its tree
        std::uint16_t of_class;
        std::uint8_t touches;
        std::uint8_t gap;
    };
    static_assert(sizeof(Block) == 32);
    // Twice the accesses for each block of a table that pass before it goes by what was learnt.
    static constexpr std::size_t kTurnsTimesTwo = 3;
    static constexpr std::uint16_t kCold = ReuseStatistics::kClasses;  // the class of cooled blocks
    static constexpr std::uint16_t kClassMask = 0x3fff, kEvictable = 0x4000, kInTree = 0x8000;

    using Trees = std::map<std::uint32_t, std::uint32_t>;  // (domain, class) -> root
    class Walk;

    // A block that was to go, as it was when that was decided.
    struct Candidate {
        std::uint32_t id, birth, touched;
        float rank;
    };
    // The blocks of a domain that go next. Finding them takes longer than going through them, so they serve several prompts.
    struct Queue {
        std::vector<Candidate> next;
        std::uint32_t made_at = 0;
    };
    void drop_changed(std::vector<Candidate>* queue) const;
    // At least n that go next, or all.
    const std::vector<Candidate>& leaving(std::uint16_t domain, std::size_t n) const;

    std::uint16_t class_of(std::uint32_t id) const { return blocks_[id].of_class & kClassMask; }
    std::uint32_t age(std::uint32_t id) const { return learnt_->now - blocks_[id].touched; }
    static std::uint32_t tree_key(std::uint16_t domain, std::uint16_t of_class) {
        return std::uint32_t{domain} << 16 | of_class;
    }
    float rank(std::uint16_t of_class, unsigned step) const {
        return of_class == kCold ? -1.0f : learnt_->statistics.rank(of_class, step);
    }
    const Block* parent_of(const Block& block) const;
    Block* parent_of(const Block& block) { return const_cast<Block*>(static_cast<const ReuseOrder*>(this)->parent_of(block)); }

    // Trees: ordered by how long ago a block was asked for, longest first, and by entry; shaped by a random-looking priority
    // of each entry (treaps).
    bool before(std::uint32_t a, std::uint32_t b) const {
        const auto distance = static_cast<std::int32_t>(blocks_[a].touched - blocks_[b].touched);
        return distance != 0 ? distance < 0 : a < b;
    }
    std::uint32_t priority(std::uint32_t id) const { return (id ^ blocks_[id].birth * 0x85ebca6bu) * 0x9e3779b1u; }
    void split(std::uint32_t root, std::uint32_t at, std::uint32_t* low, std::uint32_t* high);
    std::uint32_t merge(std::uint32_t low, std::uint32_t high);
    std::uint32_t erased(std::uint32_t root, std::uint32_t id);
    void into_tree(std::uint32_t id, std::uint16_t domain);
    void out_of_tree(std::uint32_t id, std::uint16_t domain);
    void count_tree(std::uint32_t root, std::size_t* count) const;

    // Whether a block comes after another one, or may come: then it cannot be its parent, because neither would ever go.
    bool follows(std::uint32_t id, std::uint32_t other) const;
    void child_gone(const Block& child, std::uint16_t domain);
    void remember(std::uint64_t key, const Remembered& block);
    void look_at_some(std::size_t asked_blocks);

    Remembered known(std::uint64_t key, std::uint32_t id) const {
        const Block& block = blocks_[id];
        return {key, block.touched, class_of(id), block.touches, block.gap};
    }
    void update(std::uint32_t id, std::uint16_t domain, const Remembered& known);

    LazyArray<Block> blocks_;
    std::shared_ptr<ReuseLearnt> learnt_;
    bool below_ = false;  // what is learnt is the business of the table above
    Trees trees_;
    mutable std::unordered_map<std::uint16_t, Queue> queues_;
    std::uint32_t latest_ = 0;  // blocks of the latest prompt
    std::uint32_t births_ = 0;
    std::uint32_t used_ = 0;
    // A look at all open spells, some of them with each prompt; when it is through, it is learnt.
    std::size_t looked_at_ = 0;
    std::size_t prompts_ = 0;  // since it was learnt
};

template <class IsEvictable>
std::string ReuseOrder::check(std::size_t used, IsEvictable is_evictable) const {
    std::unordered_map<std::uint32_t, std::uint32_t> children;
    std::size_t in_trees = 0;
    for (std::uint32_t id = 0; id < used; ++id) {
        const Block& block = blocks_[id];
        if (block.birth == 0) continue;
        if (const Block* const parent = parent_of(block)) ++children[static_cast<std::uint32_t>(parent - &blocks_[0])];
        const bool can_go = (block.of_class & kEvictable) != 0, in_tree = (block.of_class & kInTree) != 0;
        if (can_go != is_evictable(id)) return "the order and the table do not agree about entry " + std::to_string(id);
        if (in_tree != (can_go && block.children == 0)) return "the order misplaces entry " + std::to_string(id);
        in_trees += in_tree;
    }
    for (std::uint32_t id = 0; id < used; ++id)
        if (blocks_[id].birth != 0 && blocks_[id].children != children[id])
            return "entry " + std::to_string(id) + " has a wrong number of children";
    std::size_t found = 0;
    for (const auto& [key, root] : trees_) count_tree(root, &found);
    return found == in_trees ? "" : "the order's trees have lost or kept entries";
}

}  // namespace kvtier
