#include "reuse_order.hpp"

#include <algorithm>
#include <queue>

namespace kvtier {

namespace {

// Of a block whose prompt was not seen as a whole.
constexpr std::size_t kSomewhere = 16, kMany = 65;
// Open spells looked at with each prompt, and for each of its blocks; and prompts between two times that it is learnt.
constexpr std::size_t kLooks = 1024, kLooksPerBlock = 32, kPromptsMin = 100;
// What goes next is decided for so many blocks beyond those that are asked for, and anew after so many accesses.
constexpr std::size_t kQueued = 256;
// Blocks before one that are looked at before it gets a child that has children.
constexpr std::size_t kFollowed = 1024;
constexpr std::uint32_t kQueueAge = 100;

}  // namespace

ReuseOrder::ReuseOrder(std::size_t capacity, std::size_t history_blocks)
    : blocks_(capacity, true), learnt_(std::make_shared<ReuseLearnt>(history_blocks)) {}

ReuseOrder::ReuseOrder(std::size_t capacity, const ReuseOrder& above) : blocks_(capacity, true), learnt_(above.learnt_), below_(true) {}

const ReuseOrder::Block* ReuseOrder::parent_of(const Block& block) const {
    if (block.parent == kNoEntry) return nullptr;
    const Block& parent = blocks_[block.parent];
    return parent.birth == block.parent_birth ? &parent : nullptr;
}

// --- trees ---------------------------------------------------------------------------------------------------------------

// Parts a tree into what comes before `at`, and the rest.
void ReuseOrder::split(std::uint32_t root, std::uint32_t at, std::uint32_t* low, std::uint32_t* high) {
    while (root != kNoEntry) {
        if (before(root, at)) {
            *low = root;
            low = &blocks_[root].right;
            root = *low;
        } else {
            *high = root;
            high = &blocks_[root].left;
            root = *high;
        }
    }
    *low = *high = kNoEntry;
}

std::uint32_t ReuseOrder::merge(std::uint32_t low, std::uint32_t high) {
    std::uint32_t root = kNoEntry;
    std::uint32_t* place = &root;
    while (low != kNoEntry && high != kNoEntry) {
        if (priority(low) >= priority(high)) {
            *place = low;
            place = &blocks_[low].right;
            low = *place;
        } else {
            *place = high;
            place = &blocks_[high].left;
            high = *place;
        }
    }
    *place = low != kNoEntry ? low : high;
    return root;
}

std::uint32_t ReuseOrder::erased(std::uint32_t root, std::uint32_t id) {
    std::uint32_t* place = &root;
    while (*place != id) place = before(id, *place) ? &blocks_[*place].left : &blocks_[*place].right;
    *place = merge(blocks_[id].left, blocks_[id].right);
    return root;
}

void ReuseOrder::into_tree(std::uint32_t id, std::uint16_t domain) {
    std::uint32_t& root = trees_.try_emplace(tree_key(domain, class_of(id)), kNoEntry).first->second;
    Block& block = blocks_[id];
    block.of_class |= kInTree;
    std::uint32_t* place = &root;
    while (*place != kNoEntry && priority(*place) >= priority(id))
        place = before(id, *place) ? &blocks_[*place].left : &blocks_[*place].right;
    split(*place, id, &block.left, &block.right);
    *place = id;
}

void ReuseOrder::out_of_tree(std::uint32_t id, std::uint16_t domain) {
    const auto tree = trees_.find(tree_key(domain, class_of(id)));
    tree->second = erased(tree->second, id);
    if (tree->second == kNoEntry) trees_.erase(tree);
    blocks_[id].of_class &= static_cast<std::uint16_t>(~kInTree);
}

void ReuseOrder::count_tree(std::uint32_t root, std::size_t* count) const {
    if (root == kNoEntry) return;
    ++*count;
    count_tree(blocks_[root].left, count);
    count_tree(blocks_[root].right, count);
}

// --- what happens --------------------------------------------------------------------------------------------------------

void ReuseOrder::asked(std::uint16_t domain, std::span<const std::uint64_t> keys, Ids entries, std::span<Below> below) {
    const std::size_t n = keys.size();
    ReuseHistory& history = learnt_->history;
    learnt_->now += latest_;  // so the age of the blocks of a prompt is 0 while it is dealt with
    latest_ = static_cast<std::uint32_t>(n);
    const std::uint32_t now = learnt_->now;
    const auto with = [&](std::size_t i) {
        return std::find_if(below.begin(), below.end(), [i](const Below& each) { return each.entries[i] != kNoEntry; });
    };
    std::size_t news = 0;
    for (std::size_t i = 0; i < n; ++i)
        news += entries[i] == kNoEntry && history.find(keys[i]) == nullptr && with(i) == below.end();
    std::uint8_t inherited = ReuseStatistics::kNoGap;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t id = entries[i];
        Remembered block{keys[i], now, 0, 0, ReuseStatistics::kNoGap};
        Remembered* ghost = nullptr;
        if (id != kNoEntry) {
            block = known(keys[i], id);
        } else if ((ghost = history.find(keys[i])) != nullptr) {
            block = *ghost;
        } else if (const auto there = with(i); there != below.end()) {
            block = there->order->known(keys[i], there->entries[i]);
        }
        std::uint8_t gap = inherited;
        if (block.touches != 0) {
            const std::uint32_t waited = now - block.touched;
            if (block.of_class != kCold) learnt_->statistics.reused(block.of_class, waited);
            block.gap = gap = inherited = ReuseStatistics::gap_after(waited, block.gap);
        }
        block.touches = static_cast<std::uint8_t>(std::min(block.touches + 1, 255));
        block.touched = now;
        block.of_class = ReuseStatistics::class_of(block.touches, i + 1 == n, i, news, gap);
        if (id != kNoEntry) {
            update(id, domain, block);
        } else {
            if (ghost != nullptr) ghost->touches = 0;  // it is remembered anew
            remember(keys[i], block);
        }
        for (const Below& each : below)
            if (each.entries[i] != kNoEntry) each.order->update(each.entries[i], each.domain, block);
    }
    for (std::size_t first = 0, end; first < n; first = end + 1) {
        for (end = first; end < n && entries[end] != kNoEntry; ++end) {
        }
        chained(entries.subspan(first, end - first), domain);
    }
    // Several tables share the blocks of a prompt, so each has holes.
    for (Below& each : below) {
        std::erase(each.entries, kNoEntry);
        each.order->chained(each.entries, each.domain);
    }
    look_at_some(n);
}

void ReuseOrder::update(std::uint32_t id, std::uint16_t domain, const Remembered& known) {
    Block& block = blocks_[id];
    const bool in_tree = (block.of_class & kInTree) != 0;
    if (in_tree) out_of_tree(id, domain);
    block.touched = known.touched;
    block.touches = known.touches;
    block.gap = known.gap;
    block.of_class = static_cast<std::uint16_t>((block.of_class & ~kClassMask) | known.of_class);
    if (in_tree) into_tree(id, domain);
}

void ReuseOrder::same_as(std::uint32_t id, const ReuseOrder& above, std::uint32_t of) {
    const Block& other = above.blocks_[of];
    Block& block = blocks_[id];
    block.touched = other.touched;
    block.touches = other.touches;
    block.gap = other.gap;
    block.of_class = static_cast<std::uint16_t>((block.of_class & ~kClassMask) | above.class_of(of));
}

void ReuseOrder::remember(std::uint64_t key, const Remembered& block) {
    Remembered kept = block;
    kept.key = key;
    learnt_->history.put(kept, [&](const Remembered& gone) {
        if (gone.of_class != kCold) learnt_->statistics.forgotten(gone.of_class, learnt_->now - gone.touched);
    });
}

void ReuseOrder::chained(Ids entries, std::uint16_t domain) {
    for (std::size_t i = 1; i < entries.size(); ++i) {
        Block& child = blocks_[entries[i]];
        if (entries[i] == entries[i - 1] || parent_of(child) != nullptr || follows(entries[i - 1], entries[i])) continue;
        Block& parent = blocks_[entries[i - 1]];
        child.parent = entries[i - 1];
        child.parent_birth = parent.birth;
        if (++parent.children == 1 && (parent.of_class & kInTree) != 0) out_of_tree(entries[i - 1], domain);
    }
}

// A child without children is followed by nobody. So that nobody makes this take long, a chain is followed for some time only.
bool ReuseOrder::follows(std::uint32_t id, std::uint32_t other) const {
    if (blocks_[other].children == 0) return false;
    const Block* block = &blocks_[id];
    for (std::size_t steps = 0; steps < kFollowed; ++steps) {
        const Block* const parent = parent_of(*block);
        if (parent == nullptr) return false;
        if (block->parent == other) return true;
        block = parent;
    }
    return true;
}

void ReuseOrder::created(std::uint32_t id, std::uint64_t key) {
    Block& block = blocks_[id];
    block = {learnt_->now, kNoEntry, 0, ++births_, 0, kNoEntry, kNoEntry, 0, 1, ReuseStatistics::kNoGap};
    if (births_ == 0) block.birth = ++births_;
    used_ = std::max(used_, id + 1);
    if (Remembered* const ghost = below_ ? nullptr : learnt_->history.find(key)) {
        block.touched = ghost->touched;
        block.of_class = ghost->of_class;
        block.touches = ghost->touches;
        block.gap = ghost->gap;
        ghost->touches = 0;
    } else {
        block.of_class = class_of_new();
    }
}

std::uint16_t ReuseOrder::class_of_new() {
    return ReuseStatistics::class_of(1, false, kSomewhere, kMany, ReuseStatistics::kNoGap);
}

void ReuseOrder::removed(std::uint32_t id, std::uint64_t key, std::uint16_t domain) {
    Block& block = blocks_[id];
    const Block gone = block;
    block.birth = 0;
    block.children = 0;
    block.of_class = 0;
    if (!below_)  // else the table above knows it
        remember(key, {key, gone.touched, static_cast<std::uint16_t>(gone.of_class & kClassMask), gone.touches, gone.gap});
    child_gone(gone, domain);
}

void ReuseOrder::child_gone(const Block& child, std::uint16_t domain) {
    Block* const parent = parent_of(child);
    if (parent != nullptr && --parent->children == 0 && (parent->of_class & kEvictable) != 0)
        into_tree(child.parent, domain);
}

void ReuseOrder::evictable(std::uint32_t id, std::uint16_t domain) {
    blocks_[id].of_class |= kEvictable;
    if (blocks_[id].children == 0) into_tree(id, domain);
}

void ReuseOrder::unevictable(std::uint32_t id, std::uint16_t domain) {
    if ((blocks_[id].of_class & kInTree) != 0) out_of_tree(id, domain);
    blocks_[id].of_class &= static_cast<std::uint16_t>(~kEvictable);
}

void ReuseOrder::cooled(std::uint32_t id, std::uint16_t domain) {
    Block& block = blocks_[id];
    const bool in_tree = (block.of_class & kInTree) != 0;
    if (in_tree) out_of_tree(id, domain);
    block.of_class = static_cast<std::uint16_t>((block.of_class & ~kClassMask) | kCold);
    queues_.erase(domain);
    if (in_tree) into_tree(id, domain);
}

// --- learning ------------------------------------------------------------------------------------------------------------

void ReuseOrder::look_at_some(std::size_t asked_blocks) {
    ++prompts_;
    if (looked_at_ == 0 && prompts_ < kPromptsMin) return;
    const std::size_t all = used_ + learnt_->history.size();
    const std::size_t end = std::min(all, looked_at_ + kLooks + kLooksPerBlock * asked_blocks);
    for (; looked_at_ < end; ++looked_at_) {
        if (looked_at_ < used_) {
            const Block& block = blocks_[looked_at_];
            const auto id = static_cast<std::uint32_t>(looked_at_);
            if (block.birth != 0 && class_of(id) != kCold) learnt_->statistics.open(class_of(id), age(id));
        } else {
            const Remembered& ghost = learnt_->history.at(looked_at_ - used_);
            if (ghost.touches != 0 && ghost.of_class != kCold) learnt_->statistics.open(ghost.of_class, learnt_->now - ghost.touched);
        }
    }
    if (end < all) return;
    learnt_->statistics.learn();
    queues_.clear();
    looked_at_ = 0;
    prompts_ = 0;
}

// --- who goes ------------------------------------------------------------------------------------------------------------

// Blocks of a domain in the order in which they would go. Changes nothing: a parent whose children have all gone before it
// comes in its turn.
class ReuseOrder::Walk {
   public:
    Walk(const ReuseOrder& order, std::uint16_t domain) : order_(order) {
        const auto end = order.trees_.lower_bound(tree_key(domain, 0) + 0x10000u);
        // The last domain has no next one.
        const bool last = domain == 0xffff;
        for (auto tree = order.trees_.lower_bound(tree_key(domain, 0)); tree != order.trees_.end() && (last || tree != end); ++tree)
            for (std::uint32_t id = leftmost(tree->second); id != kNoEntry;) {
                const unsigned step = push(id, tree->second);
                id = step == 0 ? kNoEntry : first_younger(tree->second, ReuseStatistics::first_age(step));
            }
    }

    // The next one, kNoEntry after the last; `rank` is what it offers.
    std::uint32_t next(float* rank) {
        if (cells_.empty()) return kNoEntry;
        const Cell cell = cells_.top();
        cells_.pop();
        *rank = cell.rank;
        if (cell.root != kNoEntry)
            if (const std::uint32_t follower = after(cell.root, cell.id); follower != kNoEntry && step(follower) == step(cell.id))
                push(follower, cell.root);
        const Block& gone = order_.blocks_[cell.id];
        if (const Block* const parent = order_.parent_of(gone))
            if (++gone_[gone.parent] == parent->children && (parent->of_class & kEvictable) != 0) push(gone.parent, kNoEntry);
        return cell.id;
    }

   private:
    struct Cell {
        float rank;
        std::uint32_t age;
        std::uint32_t id;
        std::uint32_t root;  // of the tree from which it comes; kNoEntry for a parent
        bool operator<(const Cell& other) const {  // the queue has the greatest first
            return rank != other.rank ? rank > other.rank : age != other.age ? age < other.age : id > other.id;
        }
    };

    unsigned step(std::uint32_t id) const { return ReuseStatistics::step(order_.age(id)); }
    unsigned push(std::uint32_t id, std::uint32_t root) {
        const unsigned now = step(id);
        cells_.push({order_.rank(order_.class_of(id), now), order_.age(id), id, root});
        return now;
    }
    std::uint32_t leftmost(std::uint32_t root) const {
        std::uint32_t found = kNoEntry;
        for (; root != kNoEntry; root = order_.blocks_[root].left) found = root;
        return found;
    }
    // The oldest block that is younger than `age`.
    std::uint32_t first_younger(std::uint32_t root, std::uint32_t age) const {
        std::uint32_t found = kNoEntry;
        while (root != kNoEntry) {
            const bool younger = order_.age(root) < age;
            if (younger) found = root;
            root = younger ? order_.blocks_[root].left : order_.blocks_[root].right;
        }
        return found;
    }
    std::uint32_t after(std::uint32_t root, std::uint32_t id) const {
        std::uint32_t found = kNoEntry;
        while (root != kNoEntry) {
            const bool later = order_.before(id, root);
            if (later) found = root;
            root = later ? order_.blocks_[root].left : order_.blocks_[root].right;
        }
        return found;
    }

    const ReuseOrder& order_;
    std::priority_queue<Cell> cells_;
    std::unordered_map<std::uint32_t, std::uint32_t> gone_;  // children of each parent that have gone
};

// Whether blocks of a queue are still as they were, in their order: a parent counts if its children come before it.
void ReuseOrder::drop_changed(std::vector<Candidate>* queue) const {
    std::unordered_map<std::uint32_t, std::uint32_t> gone;
    std::size_t kept = 0;
    for (const Candidate& each : *queue) {
        const Block& block = blocks_[each.id];
        if (block.birth != each.birth || block.touched != each.touched || (block.of_class & kEvictable) == 0) continue;
        if (block.children != 0) {
            const auto found = gone.find(each.id);
            if (found == gone.end() || found->second != block.children) continue;
        }
        if (parent_of(block) != nullptr) ++gone[block.parent];
        (*queue)[kept++] = each;
    }
    queue->resize(kept);
}

const std::vector<ReuseOrder::Candidate>& ReuseOrder::leaving(std::uint16_t domain, std::size_t n) const {
    Queue& queue = queues_[domain];
    if (learnt_->now - queue.made_at <= kQueueAge) {
        drop_changed(&queue.next);
        if (queue.next.size() >= n) return queue.next;
    }
    queue.next.clear();
    queue.made_at = learnt_->now;
    Walk walk(*this, domain);
    float rank;
    for (std::uint32_t id; queue.next.size() < n + kQueued && (id = walk.next(&rank)) != kNoEntry;)
        queue.next.push_back({id, blocks_[id].birth, blocks_[id].touched, rank});
    return queue.next;
}

std::size_t ReuseOrder::victims(std::uint16_t domain, std::size_t n, std::uint32_t* out) const {
    const std::vector<Candidate>& queue = leaving(domain, n);
    const std::size_t found = std::min(n, queue.size());
    for (std::size_t i = 0; i < found; ++i) out[i] = queue[i].id;
    return found;
}

std::size_t ReuseOrder::admitted(std::uint16_t domain, const ReuseOrder& of, Ids entries, std::size_t free) const {
    std::size_t kept = std::min(free, entries.size());
    const std::size_t more = entries.size() - kept;
    if (more == 0) return kept;
    const std::vector<Candidate>& queue = leaving(domain, more);
    for (std::size_t i = 0; i < more; ++i, ++kept) {
        if (i == queue.size()) return entries.size();  // what others have decides
        const std::uint32_t id = entries[kept];
        if (queue[i].rank >= rank(of.class_of(id), ReuseStatistics::step(of.age(id)))) break;
    }
    return kept;
}

}  // namespace kvtier
