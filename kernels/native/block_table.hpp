// Metadata of all blocks of one tier: key -> entry -> state, pins, recency, slots. It has one writer, and reserves all memory
// when it is made. Every batch is checked completely before anything changes: an exception leaves the table as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "index_page.hpp"
#include "key_hash.hpp"
#include "key_index.hpp"
#include "lazy_array.hpp"
#include "reuse_order.hpp"
#include "slot_map.hpp"

namespace kvtier {

constexpr std::uint32_t kNoSlot = 0;
constexpr std::size_t kDomains = 65536;
constexpr std::size_t kCapacityMax = std::size_t{1} << 30;
// More pins than leases and transfers can ever hold on one block, so that a leak is found long before a counter wraps.
constexpr std::uint32_t kPinsMax = (1u << 20) - 1;
constexpr int kFlagBits = 12;
constexpr std::uint16_t kFlags = (1u << kFlagBits) - 1;

enum BlockState : std::uint8_t { kAbsent = 0, kWriting = 1, kReady = 2, kEvicting = 3 };
enum Created : std::uint8_t { kExisted = 0, kCreated = 1, kTableFull = 2 };

class BlockTable {
   public:
    using Entries = std::span<const std::uint32_t>;

    struct Entry {
        std::uint8_t hash[kHashBytes];
        std::uint32_t space;
        std::uint32_t first_record;  // the first record of its slots; 0 if it has none yet
        std::uint32_t prev;          // towards the least recent
        std::uint32_t next;          // towards the most recent; for a free entry, the next free one
        std::uint32_t pins;
        std::uint32_t generation;
        std::uint32_t staged;  // how often the batch being checked names this entry; 0 between calls
        std::uint16_t domain;
        std::uint16_t state : 4;
        std::uint16_t flags : kFlagBits;
    };
    static_assert(sizeof(Entry) == 64, "one cache line");

    struct Stats {
        std::size_t writing, ready, evicting, capacity, bytes;
        std::map<std::uint16_t, std::size_t> domains;  // live blocks of each domain that has any
    };

    // With `ranks`, what goes is decided by what is learnt of reuse, and not by recency; then at least `history_blocks` that
    // are not there any more are remembered. Throws if capacity is not 1 to 2^30 or pool_pages is not 2 to 2^32.
    BlockTable(std::size_t capacity, std::size_t pool_pages, std::uint64_t seed, bool ranks = false,
               std::size_t history_blocks = 0);

    void lookup(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint32_t* entries,
                std::uint8_t* states) const;
    // Writes the leading run of READY entries and returns its length; `ended` is the state of the block after it.
    std::size_t lookup_prefix(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint32_t* entries,
                              std::uint8_t* ended) const;
    void insert(std::uint32_t space, std::uint16_t domain, std::span<const std::uint8_t> hashes, std::uint16_t flags,
                std::uint32_t* entries, std::uint8_t* created);

    void attach_slots(Entries entries, const std::uint32_t* slots, std::size_t world);
    void slots(Entries entries, std::size_t world, std::uint32_t* out) const;
    void owners(std::span<const std::uint32_t> slots, std::uint32_t* out) const;

    void commit(Entries entries);
    void begin_evict(Entries entries);
    void condemn(Entries entries);
    void remove(Entries entries);
    void pin(Entries entries);
    void unpin(Entries entries);
    void touch(Entries entries);
    // The opposite of touch: evictable entries become the least recent, the last of the batch most of all.
    void cool(Entries entries);
    std::size_t victims(std::uint16_t domain, std::size_t n, std::uint32_t* out) const;

    using Tables = std::span<BlockTable* const>;
    // A prompt of these blocks, from its first on, is asked for; so is what tables below have of it. Without ranks, nothing
    // happens.
    void asked(std::uint32_t space, std::uint16_t domain, std::span<const std::uint8_t> hashes, Tables below);
    // Each of these entries is asked for by itself. Without ranks, nothing happens.
    void asked_each(Entries entries, Tables below);
    // New entries are the same blocks as those of the table above: what is known of them, and what they follow, is taken over.
    void same_as(Entries entries, const BlockTable& above, Entries of);
    // Entries that follow each other in a prompt. Without ranks, nothing happens.
    void chained(Entries entries);
    // How many of these new entries, in their order, are worth their room, if there is room for `free` of them. Without ranks,
    // all are.
    std::size_t admitted(std::uint16_t domain, Entries entries, std::size_t free) const;
    // The same for entries of the table above.
    std::size_t admitted_of(std::uint16_t domain, const BlockTable& above, Entries entries, std::size_t free) const;
    bool ranks() const { return order_ != nullptr; }
    // Whether the order decides by now what goes.
    bool ranked() const { return order_ != nullptr && order_->decides(states_[kReady]); }
    // What was learnt of reuse; null without ranks.
    ReuseOrder* order() { return order_.get(); }
    // A hash of a block's name that only this table can compute, and its entry or kNoEntry.
    std::uint64_t key(std::uint32_t space, const std::uint8_t* hash) const { return key_hash_.wide(space, hash); }
    std::uint32_t find(std::uint32_t space, const std::uint8_t* hash) const {
        return index_.find(key_hash_(space, hash), [&](std::uint32_t id) { return same(id, space, hash); });
    }
    // Begins to rank, with nothing learnt; blocks that are there count as asked for once, the least recent first. Or stops.
    void rank(std::size_t history_blocks);
    // The same, by what the table above learns.
    void rank_below(const BlockTable& above);
    void stop_ranking() { order_.reset(); }
    // What was learnt, as bytes; empty without ranks. restore_learnt() returns false, and changes nothing, if it cannot use
    // them.
    std::vector<std::byte> learnt() const { return order_ ? order_->saved() : std::vector<std::byte>{}; }
    bool restore_learnt(std::span<const std::byte> saved) { return order_ && order_->restore(saved); }
    // Up to n of the first `horizon` victims that have none of these flags.
    std::size_t coldest(std::uint16_t domain, std::size_t n, std::uint16_t without_flags, std::size_t horizon,
                        std::uint32_t* out) const;
    // How many victims a domain has.
    std::size_t evictable(std::uint16_t domain) const { return domains_[domain].linked; }
    void set_flags(Entries entries, std::uint16_t flags);
    void clear_flags(Entries entries, std::uint16_t flags);

    // Calls read(i, entry) for each entry. Throws before the first call if one of them is not live.
    template <class Read>
    void read(Entries entries, Read read) const {
        for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
        for (std::size_t i = 0; i < entries.size(); ++i) read(i, entries_[entries[i]]);
    }
    // Calls visit(id, entry) for each live entry in the order of their ids.
    template <class Visit>
    void each(Visit visit) const {
        for (std::uint32_t id = 0; id < used_; ++id)
            if (entries_[id].state != kAbsent) visit(id, entries_[id]);
    }
    std::vector<std::uint32_t> slots_of(const Entry& entry) const;

    // From now on the page gets the hashes of a space's new blocks, in whatever state. publish_more adds those that are there
    // already. Throws if the space has a page.
    void publish(std::uint32_t space, std::shared_ptr<IndexPage> page);
    // Looks at up to n more entries. Returns whether that were all.
    bool publish_more(std::uint32_t space, std::size_t n);
    // Stops changing the page.
    void withdraw(std::uint32_t space);

    std::size_t count(std::uint32_t space) const;
    std::vector<std::uint32_t> entries_of(std::uint32_t space) const;
    // Appends the READY entries of a space among the n entries from `first` on, in ascending order. Returns where to go on:
    // the capacity, if no entry from there on was ever used.
    std::size_t ready_among(std::uint32_t space, std::size_t first, std::size_t n, std::vector<std::uint32_t>& found) const;
    Stats stats() const;
    // Compares every structure with every other. Returns what does not fit, or an empty string. See block_table_check.cpp.
    std::string check() const;

   private:
    struct Domain {
        std::uint32_t oldest;  // the entry + 1; 0 if there is none
        std::uint32_t newest;  // the same
        std::uint32_t linked;
        std::uint32_t live;
    };

    // A space's page, and how far it is filled: entries from `seen` on were not looked at yet.
    struct Published {
        std::shared_ptr<IndexPage> page;
        std::uint32_t seen = 0;
    };
    static constexpr std::uint32_t kAllSeen = 0xffffffffu;
    Published* published_of(std::uint32_t space);

    const Entry& live(Entries entries, std::size_t i) const;
    template <class Check>
    void stage(Entries entries, Check check);
    Entry& unstage(std::uint32_t id) {
        Entry& entry = entries_[id];
        entry.staged = 0;
        return entry;
    }
    void require_distinct(const Entry& entry, Entries entries, std::size_t i) const;
    void require_state(const Entry& entry, Entries entries, std::size_t i, BlockState state) const;
    bool same(std::uint32_t id, std::uint32_t space, const std::uint8_t* hash) const;
    std::optional<std::pair<std::uint16_t, std::vector<std::uint32_t>>> of_one_domain(std::uint32_t space,
                                                                                       std::span<const std::uint8_t> hashes) const;
    void rank_by(std::unique_ptr<ReuseOrder> order);
    std::uint32_t create(std::uint32_t space, std::uint16_t domain, const std::uint8_t* hash, std::uint32_t tag,
                         std::uint16_t flags);
    void set_state(Entry& entry, BlockState state) {
        --states_[entry.state];
        entry.state = state;
        ++states_[state];
    }
    static bool evictable(const Entry& entry) { return entry.state == kReady && entry.pins == 0; }
    template <auto end, auto other_end, auto outward, auto inward>
    void link(std::uint32_t id);
    void link_newest(std::uint32_t id);
    void link_oldest(std::uint32_t id);
    void unlink(std::uint32_t id);

    KeyHash key_hash_;
    LazyArray<Entry> entries_;
    KeyIndex index_;
    SlotMap slot_map_;
    LazyArray<Domain> domains_;
    std::size_t pool_pages_;
    std::uint32_t used_ = 0;           // entries from here on were never used
    std::uint32_t free_ = kNoEntry;    // removed entries, the latest first
    std::size_t states_[4] = {0, 0, 0, 0};
    std::unordered_map<std::uint32_t, std::size_t> spaces_;  // live blocks of each space that has any
    std::unordered_map<std::uint32_t, Published> published_;
    std::unique_ptr<ReuseOrder> order_;  // null without ranks
};

const char* state_name(std::uint8_t state);

}  // namespace kvtier
