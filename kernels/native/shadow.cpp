#include "shadow.hpp"

#include <algorithm>

namespace kvtier {

namespace {

constexpr std::array<double, kShadowSizes> kParts = {0.5, 1, 2};
constexpr unsigned kPresent = 1;

}  // namespace

void PoolShadow::make_caches() {
    if (table_.order() != nullptr) {
        by_recency_.reset();
        if (!by_reuse_.empty()) return;
        // A block takes more time to follow by reuse, so fewer are.
        for (unsigned size = 0; size < kShadowSizes; ++size) by_reuse_.push_back(std::make_unique<ReuseShadow>(blocks_ * 5 / 8));
    } else {
        by_reuse_.clear();
        if (!by_recency_) by_recency_ = std::make_unique<RecencyShadow>(blocks_);
    }
}

void PoolShadow::begin(double capacity_bytes, double skipped_bytes) {
    make_caches();
    if (by_recency_) by_recency_->clear();
    for (const std::unique_ptr<ReuseShadow>& cache : by_reuse_) cache->clear();
    threshold_ = std::uint64_t{1} << 32;
    skipped_bytes_ = skipped_bytes;
    counted_ = {};
    capacity_bytes_ = capacity_bytes;
    set_limits();
}

void PoolShadow::resize(double capacity_bytes) {
    if (outdated()) return begin(capacity_bytes, 2 * capacity_bytes);
    capacity_bytes_ = capacity_bytes;
    counted_ = {};
    set_limits();
}

void PoolShadow::set_limits() {
    std::array<double, kShadowSizes> limits;
    for (unsigned size = 0; size < kShadowSizes; ++size) limits[size] = kParts[size] * capacity_bytes_ * share();
    if (by_recency_) by_recency_->resize(limits);
    for (unsigned size = 0; size < by_reuse_.size(); ++size) by_reuse_[size]->resize(limits[size], *table_.order());
}

std::size_t PoolShadow::room() const {
    std::size_t least = by_recency_ ? by_recency_->room() : blocks_;
    for (const std::unique_ptr<ReuseShadow>& cache : by_reuse_) least = std::min(least, cache->room());
    return least;
}

void PoolShadow::thin_out() {
    threshold_ /= 2;
    const auto stays = [this](std::uint64_t key) { return in_sample(key); };
    if (by_recency_) by_recency_->keep(stays);
    for (const std::unique_ptr<ReuseShadow>& cache : by_reuse_) cache->keep(stays);
    set_limits();
}

// The sample of a batch, for which there is room.
void PoolShadow::sample(std::uint32_t space, std::span<const std::uint8_t> hashes) {
    if (outdated()) begin(capacity_bytes_, 2 * capacity_bytes_);
    sample_.clear();
    const std::size_t n = hashes.size() / kHashBytes;
    for (std::size_t i = 0; i < n; ++i)
        if (const std::uint64_t key = table_.key(space, hashes.data() + i * kHashBytes); in_sample(key)) sample_.push_back({key, i});
    while (room() < sample_.size()) {
        thin_out();
        std::erase_if(sample_, [this](const Sampled& each) { return !in_sample(each.key); });
    }
}

void PoolShadow::skip(double bytes) { skipped_bytes_ = std::max(0.0, skipped_bytes_ - bytes); }

void PoolShadow::asked(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint64_t block_bytes, std::size_t hits) {
    sample(space, hashes);
    std::array<std::size_t, kShadowSizes> there{};
    if (by_recency_) {
        found_.clear();
        unsigned smallest = 0;  // that has all blocks so far
        for (const Sampled& each : sample_) {
            const std::uint32_t id = by_recency_->find(each.key);
            smallest = std::max(smallest, id == kNoEntry ? kShadowSizes : by_recency_->size_of(id));
            for (unsigned size = smallest; size < kShadowSizes; ++size) ++there[size];
            if (id != kNoEntry) found_.push_back(id);
        }
        for (std::size_t i = found_.size(); i-- > 0;) by_recency_->touch(found_[i]);
        by_recency_->settle();
    } else {
        ReuseOrder& order = *table_.order();
        known_.clear();
        for (const Sampled& each : sample_) {
            const std::uint16_t of_class = order.known_class(table_.find(space, hashes.data() + each.at * kHashBytes), each.key);
            if (of_class == ReuseOrder::kUnknown) break;  // it was not told of this prompt
            known_.push_back({each.key, of_class});
        }
        for (unsigned size = 0; size < kShadowSizes; ++size) there[size] = by_reuse_[size]->asked(order, known_, block_bytes);
    }
    const std::size_t n = hashes.size() / kHashBytes;
    if (skipped_bytes_ > 0) {
        skip(static_cast<double>(n) * static_cast<double>(block_bytes));
        return;
    }
    counted_.asked += static_cast<double>(n);
    counted_.hit += static_cast<double>(hits);
    counted_.sampled += static_cast<double>(sample_.size());
    for (unsigned size = 0; size < kShadowSizes; ++size)
        counted_.missed[size] += static_cast<double>(sample_.size() - there[size]) / share();
}

void PoolShadow::stored(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint64_t block_bytes) {
    sample(space, hashes);
    if (!by_recency_) {
        ReuseOrder& order = *table_.order();
        known_.clear();
        for (const Sampled& each : sample_)
            if (order.known_class(table_.find(space, hashes.data() + each.at * kHashBytes), each.key) == ReuseOrder::kUnknown)
                known_.push_back({each.key, ReuseOrder::class_of_new()});
        for (const std::unique_ptr<ReuseShadow>& cache : by_reuse_) cache->stored(order, known_, block_bytes);
        return;
    }
    // Had they been asked for, the first of them would be in all caches. If it is not, their prompt was spared.
    const std::uint32_t first = sample_.empty() ? kNoEntry : by_recency_->find(sample_.front().key);
    const bool was_spared = first == kNoEntry || by_recency_->size_of(first) > kPresent;
    std::size_t spared_hits = 0;
    for (std::size_t i = sample_.size(); i-- > 0;) {
        const std::uint32_t id = by_recency_->find(sample_[i].key);
        if (id == kNoEntry) {
            by_recency_->put(sample_[i].key, block_bytes);
        } else {
            spared_hits += was_spared && by_recency_->size_of(id) > kPresent;
            by_recency_->touch(id);
        }
    }
    by_recency_->settle();
    if (skipped_bytes_ > 0) return;
    counted_.missed[kShadowSizes - 1] -= static_cast<double>(spared_hits) / share();
}

void PoolShadow::spared(std::size_t blocks, std::uint64_t block_bytes) {
    const auto n = static_cast<double>(blocks);
    if (skipped_bytes_ > 0) return skip(n * static_cast<double>(block_bytes));
    counted_.asked += n;
    counted_.sampled += n * share();
    for (double& missed : counted_.missed) missed += n;
}

void PoolShadow::fade(double kept) {
    counted_.asked *= kept;
    counted_.hit *= kept;
    counted_.sampled *= kept;
    for (double& missed : counted_.missed) missed *= kept;
}

PoolShadow::Figures PoolShadow::figures() const {
    Figures found = counted_;
    found.share = share();
    found.blocks = by_recency_ ? by_recency_->size() : 0;
    found.bytes = by_recency_ ? by_recency_->bytes() : 0;
    for (const std::unique_ptr<ReuseShadow>& cache : by_reuse_) {
        found.blocks = std::max(found.blocks, cache->size());
        found.bytes += cache->bytes();
    }
    return found;
}

}  // namespace kvtier
