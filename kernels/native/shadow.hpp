// What half and twice of a pool would hit, and the pool as it is, from a sample of the blocks that are asked for.
//
// A block is in the sample if a hash of its key is below a threshold (SHARDS: Waldspurger et al., FAST 2015), and three caches
// have room for the same share of half, once and twice the pool. The threshold falls as blocks become more than can be
// followed, so that a small pool is followed as a whole. What a size misses is what its cache misses of the sample, by the
// share; how many blocks are asked for is known exactly.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "block_table.hpp"
#include "shadow_recency.hpp"
#include "shadow_reuse.hpp"

namespace kvtier {

class PoolShadow {
   public:
    struct Figures {
        double asked;   // blocks
        double hit;     // blocks that the pool had
        std::array<double, kShadowSizes> missed;
        double sampled;  // of those that were asked for
        double share;    // of all blocks, that the sample has
        std::size_t blocks, bytes;
    };

    // Follows at most so many blocks for each size, of a pool that has none yet.
    PoolShadow(BlockTable& table, std::size_t blocks) : table_(table), blocks_(blocks < 64 ? 64 : blocks) { begin(0, 0); }

    // Begins anew for a pool of so many bytes. Nothing is counted until the table was asked for `skipped_bytes` of blocks.
    void begin(double capacity_bytes, double skipped_bytes);
    // The pool has another size now. What was counted is forgotten; the blocks are not.
    void resize(double capacity_bytes);

    // A prompt of these blocks, from its first on, was asked for, of which the pool had the first `hits`. To be called after
    // BlockTable::asked.
    void asked(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint64_t block_bytes, std::size_t hits);
    // Blocks of one prompt are about to be stored, in their order.
    void stored(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint64_t block_bytes);
    // So many blocks were asked for without a message, because clients knew that the pool did not have them.
    void spared(std::size_t blocks, std::uint64_t block_bytes);
    // What was counted before counts for less from now on.
    void fade(double kept);
    Figures figures() const;

   private:
    double share() const { return static_cast<double>(threshold_) / 4294967296.0; }
    bool in_sample(std::uint64_t key) const { return static_cast<std::uint32_t>(key) < threshold_; }
    void sample(std::uint32_t space, std::span<const std::uint8_t> hashes);
    std::size_t room() const;
    // Whether the table goes by another policy than it did.
    bool outdated() const { return (by_recency_ != nullptr) == (table_.order() != nullptr); }
    void make_caches();
    void set_limits();
    void thin_out();
    void skip(double bytes);

    BlockTable& table_;
    std::size_t blocks_;
    double capacity_bytes_ = 0, skipped_bytes_ = 0;
    std::uint64_t threshold_ = std::uint64_t{1} << 32;
    Figures counted_{};
    // One or the other, as the table does it.
    std::unique_ptr<RecencyShadow> by_recency_;
    std::vector<std::unique_ptr<ReuseShadow>> by_reuse_;
    struct Sampled {
        std::uint64_t key;
        std::size_t at;  // in the batch
    };
    std::vector<Sampled> sample_;
    std::vector<ShadowBlock> known_;
    std::vector<std::uint32_t> found_;
};

}  // namespace kvtier
