#include "shadow_reuse.hpp"

#include <algorithm>
#include <bit>

namespace kvtier {

namespace {

// Blocks that are looked at again with each block of the sample that is asked for.
constexpr std::size_t kLooks = 2;

}  // namespace

void ReuseShadow::clear() {
    for (std::uint32_t id = 0; id < used_; ++id)
        if (nodes_[id].live) {
            index_.erase(tag(nodes_[id].key), id);
            nodes_[id].live = false;
        }
    free_ = kNoEntry;
    used_ = looked_at_ = 0;
    count_ = 0;
    held_ = 0;
    first_.fill(kNoEntry);
    last_.fill(kNoEntry);
    filled_.fill(0);
}

// Ranks are between 2^-46 and 1; the exponent and four bits of the mantissa are in their order.
std::uint32_t ReuseShadow::bucket_of(float worth) {
    constexpr std::int32_t kLowest = (127 - 46) << 4;
    if (!(worth > 0)) return 0;
    const auto place = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(worth) >> 19) - kLowest;
    return static_cast<std::uint32_t>(std::clamp<std::int32_t>(place, 1, kBuckets - 1));
}

void ReuseShadow::into_bucket(std::uint32_t id, std::uint32_t bucket) {
    Node& node = nodes_[id];
    node.bucket = static_cast<std::uint16_t>(bucket);
    node.after = kNoEntry;
    node.before = last_[bucket];
    (node.before != kNoEntry ? nodes_[node.before].after : first_[bucket]) = id;
    last_[bucket] = id;
    filled_[bucket / 64] |= std::uint64_t{1} << bucket % 64;
}

void ReuseShadow::out_of_bucket(std::uint32_t id) {
    Node& node = nodes_[id];
    if (node.bucket == kNowhere) return;
    (node.before != kNoEntry ? nodes_[node.before].after : first_[node.bucket]) = node.after;
    (node.after != kNoEntry ? nodes_[node.after].before : last_[node.bucket]) = node.before;
    if (first_[node.bucket] == kNoEntry) filled_[node.bucket / 64] &= ~(std::uint64_t{1} << node.bucket % 64);
    node.bucket = kNowhere;
}

void ReuseShadow::rank_anew(const ReuseOrder& order, std::uint32_t id) {
    const std::uint32_t bucket = bucket_of(worth(order, id));
    if (bucket == nodes_[id].bucket) return;
    out_of_bucket(id);
    into_bucket(id, bucket);
}

// The block that goes next; kNoEntry if none may.
std::uint32_t ReuseShadow::victim(const ReuseOrder& order) {
    for (;;) {  // each block comes to its place at the first try
        const auto word = std::find_if(filled_.begin(), filled_.end(), [](std::uint64_t bits) { return bits != 0; });
        if (word == filled_.end()) return kNoEntry;
        const auto bucket = static_cast<std::uint32_t>(word - filled_.begin()) * 64 + static_cast<std::uint32_t>(std::countr_zero(*word));
        const std::uint32_t id = first_[bucket];
        rank_anew(order, id);
        if (nodes_[id].bucket <= bucket) return id;
    }
}

void ReuseShadow::leave_parent(std::uint32_t id) {
    if (const std::uint32_t parent = nodes_[id].parent; parent != kNoEntry) --nodes_[parent].children;
}

void ReuseShadow::erase(std::uint32_t id) {
    Node& node = nodes_[id];
    out_of_bucket(id);
    index_.erase(tag(node.key), id);
    held_ -= static_cast<double>(node.bytes);
    node.live = false;
    node.after = free_;
    free_ = id;
    --count_;
}

std::uint32_t ReuseShadow::add(const Node& node) {
    std::uint32_t id = free_;
    if (id != kNoEntry)
        free_ = nodes_[id].after;
    else
        id = used_++;
    nodes_[id] = node;
    index_.insert(tag(node.key), id);
    held_ += static_cast<double>(node.bytes);
    ++count_;
    return id;
}

// Each block goes to its place, if it has one, and is forgotten otherwise. Parents of those that stay must stay.
void ReuseShadow::move_together(std::span<const std::uint32_t> place) {
    std::vector<Node> kept;
    for (std::size_t id = 0; id < place.size(); ++id)
        if (place[id] != kNoEntry) kept.push_back(nodes_[id]);
    clear();
    for (Node& node : kept) {
        node.children = 0;
        node.bucket = kNowhere;
        if (node.parent != kNoEntry) node.parent = place[node.parent];
        add(node);
    }
    for (const Node& node : kept)
        if (node.parent != kNoEntry) ++nodes_[node.parent].children;
    for (std::uint32_t id = 0; id < used_; ++id)  // they are ranked when one is to go
        if (nodes_[id].children == 0) into_bucket(id, 0);
}

bool ReuseShadow::make_room(const ReuseOrder& order, std::uint64_t block_bytes, float worth_of_new) {
    const auto needed = static_cast<double>(block_bytes);
    if (needed > limit_) return false;
    while (held_ + needed > limit_) {
        const std::uint32_t going = victim(order);
        if (going == kNoEntry || worth(order, going) >= worth_of_new) return false;
        const std::uint32_t parent = nodes_[going].parent;
        leave_parent(going);
        erase(going);
        if (parent != kNoEntry && nodes_[parent].children == 0) rank_anew(order, parent);
    }
    return true;
}

void ReuseShadow::resize(double limit, const ReuseOrder& order) {
    limit_ = limit;
    while (held_ > limit_) {
        const std::uint32_t going = victim(order);
        if (going == kNoEntry) return;
        const std::uint32_t parent = nodes_[going].parent;
        leave_parent(going);
        erase(going);
        if (parent != kNoEntry && nodes_[parent].children == 0) rank_anew(order, parent);
    }
}

// `last` is the block before them, or kNoEntry. It does not go meanwhile.
void ReuseShadow::take_in(const ReuseOrder& order, std::span<const ShadowBlock> blocks, std::uint64_t block_bytes,
                          std::uint32_t last) {
    if (last != kNoEntry) out_of_bucket(last);
    for (const ShadowBlock& block : blocks) {
        std::uint32_t id = find(block.key);
        if (id == kNoEntry) {
            if (!make_room(order, block_bytes, order.worth(block.of_class, 0))) break;
            id = add({block.key, block_bytes, last, 0, kNoEntry, kNoEntry, order.now(), block.of_class, kNowhere, true});
            if (last != kNoEntry) ++nodes_[last].children;
        } else if (last != kNoEntry && nodes_[last].children == 0) {
            rank_anew(order, last);
        }
        out_of_bucket(id);
        last = id;
    }
    if (last != kNoEntry && nodes_[last].children == 0) rank_anew(order, last);
}

void ReuseShadow::look_at_some(const ReuseOrder& order, std::size_t n) {
    if (used_ == 0) return;
    for (std::size_t i = 0; i < std::min<std::size_t>(n * kLooks, used_); ++i) {
        if (++looked_at_ >= used_) looked_at_ = 0;
        if (nodes_[looked_at_].live && nodes_[looked_at_].bucket != kNowhere) rank_anew(order, looked_at_);
    }
}

std::size_t ReuseShadow::asked(const ReuseOrder& order, std::span<const ShadowBlock> prompt, std::uint64_t block_bytes) {
    std::size_t hits = 0;
    bool runs = true;
    std::uint32_t last = kNoEntry;
    look_at_some(order, prompt.size());
    for (const ShadowBlock& block : prompt) {
        const std::uint32_t id = find(block.key);
        if (id == kNoEntry) {
            runs = false;
            continue;
        }
        nodes_[id].touched = order.now();
        nodes_[id].of_class = block.of_class;
        if (runs) {
            ++hits;
            last = id;
        } else if (nodes_[id].bucket != kNowhere) {
            rank_anew(order, id);
        }
    }
    take_in(order, prompt.subspan(hits), block_bytes, last);
    return hits;
}

void ReuseShadow::stored(const ReuseOrder& order, std::span<const ShadowBlock> blocks, std::uint64_t block_bytes) {
    take_in(order, blocks, block_bytes, kNoEntry);
}

}  // namespace kvtier
