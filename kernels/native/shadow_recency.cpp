#include "shadow_recency.hpp"

namespace kvtier {

void RecencyShadow::unlink(std::uint32_t id) {
    const Node& node = nodes_[id];
    (node.newer != kNoEntry ? nodes_[node.newer].older : newest_[node.size]) = node.older;
    (node.older != kNoEntry ? nodes_[node.older].newer : oldest_[node.size]) = node.newer;
    held_[node.size] -= static_cast<double>(node.bytes);
}

void RecencyShadow::link(std::uint32_t id, unsigned size) {
    Node& node = nodes_[id];
    node.size = size;
    node.newer = kNoEntry;
    node.older = newest_[size];
    (node.older != kNoEntry ? nodes_[node.older].newer : oldest_[size]) = id;
    newest_[size] = id;
    held_[size] += static_cast<double>(node.bytes);
}

void RecencyShadow::link_oldest(std::uint32_t id, unsigned size) {
    Node& node = nodes_[id];
    node.size = size;
    node.older = kNoEntry;
    node.newer = oldest_[size];
    (node.newer != kNoEntry ? nodes_[node.newer].older : newest_[size]) = id;
    oldest_[size] = id;
    held_[size] += static_cast<double>(node.bytes);
}

void RecencyShadow::resize(const std::array<double, kShadowSizes>& limits) {
    limits_ = limits;
    for (unsigned size = 1; size < kShadowSizes; ++size)
        for (std::uint32_t id; (id = newest_[size]) != kNoEntry;) {
            unlink(id);
            link_oldest(id, 0);
        }
    settle();
}

void RecencyShadow::touch(std::uint32_t id) {
    unlink(id);
    link(id, 0);
}

void RecencyShadow::put(std::uint64_t key, std::uint64_t bytes) {
    std::uint32_t id = free_;
    if (id != kNoEntry)
        free_ = nodes_[id].older;
    else
        id = used_++;
    nodes_[id].key = key;
    nodes_[id].bytes = bytes;
    index_.insert(tag(key), id);
    ++count_;
    link(id, 0);
}

void RecencyShadow::erase(std::uint32_t id) {
    unlink(id);
    index_.erase(tag(nodes_[id].key), id);
    nodes_[id].older = free_;
    free_ = id;
    --count_;
}

void RecencyShadow::settle() {
    double held = 0;
    for (unsigned size = 0; size < kShadowSizes; ++size) {
        while (held + held_[size] > limits_[size] && oldest_[size] != kNoEntry) {
            const std::uint32_t id = oldest_[size];
            if (size + 1 == kShadowSizes) {
                erase(id);
            } else {
                unlink(id);
                link(id, size + 1);
            }
        }
        held += held_[size];
    }
}

}  // namespace kvtier
