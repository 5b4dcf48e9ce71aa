#include "block_table.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "refuse.hpp"

namespace kvtier {

namespace {

// Keys that are looked up together: enough memory accesses in flight to hide most of a cache miss, but few registers.
constexpr std::size_t kGroup = 32;
// How many entries ahead a batch of entries prefetches.
constexpr std::size_t kAhead = 8;
// Blocks before one that are looked for in a table below, to find what it follows there.
constexpr std::size_t kParentsTried = 64;

std::size_t checked_capacity(std::size_t capacity, std::size_t pool_pages) {
    if (capacity == 0 || capacity > kCapacityMax) refuse("capacity is ", capacity, "; expected 1 to ", kCapacityMax);
    if (pool_pages < 2 || pool_pages > std::size_t{1} << 32)
        refuse("pool_pages is ", pool_pages, "; expected 2 to ", std::size_t{1} << 32);
    return capacity;
}

}  // namespace

const char* state_name(std::uint8_t state) {
    static constexpr const char* names[] = {"ABSENT", "WRITING", "READY", "EVICTING"};
    return state < 4 ? names[state] : "unknown";
}

BlockTable::BlockTable(std::size_t capacity, std::size_t pool_pages, std::uint64_t seed, bool ranks,
                       std::size_t history_blocks)
    : key_hash_(seed),
      entries_(checked_capacity(capacity, pool_pages), true),
      index_(capacity),
      slot_map_(capacity, pool_pages),
      domains_(kDomains, false),
      pool_pages_(pool_pages),
      order_(ranks ? std::make_unique<ReuseOrder>(capacity, history_blocks) : nullptr) {}

// --- keys ----------------------------------------------------------------------------------------------------------------

bool BlockTable::same(std::uint32_t id, std::uint32_t space, const std::uint8_t* hash) const {
    const Entry& entry = entries_[id];
    return entry.space == space && std::memcmp(entry.hash, hash, kHashBytes) == 0;
}

void BlockTable::lookup(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint32_t* entries,
                        std::uint8_t* states) const {
    const std::size_t n = hashes.size() / kHashBytes;
    std::array<std::uint32_t, kGroup> tags;
    for (std::size_t start = 0; start < n; start += kGroup) {
        const std::size_t size = std::min(kGroup, n - start);
        const std::uint8_t* const keys = hashes.data() + start * kHashBytes;
        for (std::size_t i = 0; i < size; ++i) {
            tags[i] = key_hash_(space, keys + i * kHashBytes);
            index_.prefetch(tags[i]);
        }
        for (std::size_t i = 0; i < size; ++i) {
            const std::uint32_t candidate = index_.candidate(tags[i]);
            if (candidate != kNoEntry) __builtin_prefetch(&entries_[candidate]);
        }
        for (std::size_t i = 0; i < size; ++i) {
            const std::uint32_t found = index_.find(
                tags[i], [&](std::uint32_t id) { return same(id, space, keys + i * kHashBytes); });
            entries[start + i] = found;
            states[start + i] = found == kNoEntry ? std::uint8_t{kAbsent} : static_cast<std::uint8_t>(entries_[found].state);
        }
    }
}

std::size_t BlockTable::lookup_prefix(std::uint32_t space, std::span<const std::uint8_t> hashes, std::uint32_t* entries,
                                      std::uint8_t* ended) const {
    const std::size_t n = hashes.size() / kHashBytes;
    std::array<std::uint8_t, kGroup> states;
    *ended = kAbsent;
    for (std::size_t start = 0; start < n; start += kGroup) {
        const std::size_t size = std::min(kGroup, n - start);
        lookup(space, hashes.subspan(start * kHashBytes, size * kHashBytes), entries + start, states.data());
        for (std::size_t i = 0; i < size; ++i)
            if (states[i] != kReady) {
                *ended = states[i];
                return start + i;
            }
    }
    return n;
}

std::uint32_t BlockTable::create(std::uint32_t space, std::uint16_t domain, const std::uint8_t* hash, std::uint32_t tag,
                                 std::uint16_t flags) {
    std::uint32_t id = free_;
    if (id != kNoEntry)
        free_ = entries_[id].next;
    else
        id = used_++;
    Entry& entry = entries_[id];
    std::memcpy(entry.hash, hash, kHashBytes);
    entry.space = space;
    entry.first_record = 0;
    entry.prev = entry.next = kNoEntry;
    entry.pins = 0;
    entry.domain = domain;
    entry.flags = flags & kFlags;
    entry.state = kWriting;
    ++states_[kWriting];
    ++domains_[domain].live;
    index_.insert(tag, id);
    if (order_) order_->created(id, key_hash_.wide(space, hash));
    return id;
}

void BlockTable::insert(std::uint32_t space, std::uint16_t domain, std::span<const std::uint8_t> hashes,
                        std::uint16_t flags, std::uint32_t* entries, std::uint8_t* created) {
    const std::size_t n = hashes.size() / kHashBytes;
    if (n == 0) return;
    // These are the only allocations, and come before anything changes.
    index_.reserve(std::min(n, entries_.size() - (states_[kWriting] + states_[kReady] + states_[kEvicting])));
    std::size_t& in_space = spaces_.try_emplace(space, 0).first->second;
    const Published* const published = published_of(space);
    std::array<IndexPage::Place, kGroup> places;
    std::array<std::uint32_t, kGroup> tags;
    for (std::size_t start = 0; start < n; start += kGroup) {
        const std::size_t size = std::min(kGroup, n - start);
        const std::uint8_t* const keys = hashes.data() + start * kHashBytes;
        for (std::size_t i = 0; i < size; ++i) {
            tags[i] = key_hash_(space, keys + i * kHashBytes);
            index_.prefetch(tags[i]);
            if (published != nullptr) {
                places[i] = published->page->place(keys + i * kHashBytes);
                published->page->prefetch(places[i]);
            }
        }
        for (std::size_t i = 0; i < size; ++i) {
            const std::uint32_t candidate = index_.candidate(tags[i]);
            if (candidate != kNoEntry) __builtin_prefetch(&entries_[candidate]);
        }
        for (std::size_t i = 0; i < size; ++i) {
            const std::uint8_t* const hash = keys + i * kHashBytes;
            std::uint32_t id = index_.find(tags[i], [&](std::uint32_t other) { return same(other, space, hash); });
            Created result = kExisted;
            if (id == kNoEntry) {
                result = free_ == kNoEntry && used_ == entries_.size() ? kTableFull : kCreated;
                if (result == kCreated) {
                    id = create(space, domain, hash, tags[i], flags);
                    ++in_space;
                    if (published != nullptr && id < published->seen) published->page->add(places[i]);
                }
            }
            entries[start + i] = id;
            created[start + i] = result;
        }
    }
    if (in_space == 0) spaces_.erase(space);
}

// --- checking batches ----------------------------------------------------------------------------------------------------

const BlockTable::Entry& BlockTable::live(Entries entries, std::size_t i) const {
    if (i + kAhead < entries.size() && entries[i + kAhead] < used_) __builtin_prefetch(&entries_[entries[i + kAhead]]);
    const std::uint32_t id = entries[i];
    if (id >= used_ || entries_[id].state == kAbsent)
        refuse("entries[", i, "] is ", id, ", which is not an entry of the table");
    return entries_[id];
}

void BlockTable::require_distinct(const Entry& entry, Entries entries, std::size_t i) const {
    if (entry.staged != 0) refuse("entries[", i, "] is ", entries[i], ", which the batch names twice");
}

void BlockTable::require_state(const Entry& entry, Entries entries, std::size_t i, BlockState state) const {
    if (entry.state != state)
        refuse("entries[", i, "] is ", entries[i], ", which is ", state_name(static_cast<std::uint8_t>(entry.state)), "; expected ",
               state_name(state));
}

// Counts each entry's occurrences in `staged` while check(entry, i) looks at them one by one. If one is refused, the counts
// are reset; otherwise the caller resets them with unstage() while it makes its changes, which cannot fail.
template <class Check>
void BlockTable::stage(Entries entries, Check check) {
    std::size_t i = 0;
    try {
        for (; i < entries.size(); ++i) {
            check(live(entries, i), i);
            ++entries_[entries[i]].staged;
        }
    } catch (...) {
        for (std::size_t k = 0; k < i; ++k) entries_[entries[k]].staged = 0;
        throw;
    }
}

// --- states --------------------------------------------------------------------------------------------------------------

// Puts an entry at one end of its domain's list: `outward` links lead towards that end, `inward` ones away from it.
template <auto end, auto other_end, auto outward, auto inward>
void BlockTable::link(std::uint32_t id) {
    Entry& entry = entries_[id];
    Domain& domain = domains_[entry.domain];
    entry.*outward = kNoEntry;
    entry.*inward = domain.*end - 1;  // an empty list's 0 becomes kNoEntry
    if (domain.*end != 0)
        entries_[domain.*end - 1].*outward = id;
    else
        domain.*other_end = id + 1;
    domain.*end = id + 1;
    ++domain.linked;
    if (order_) order_->evictable(id, entry.domain);
}

void BlockTable::link_newest(std::uint32_t id) { link<&Domain::newest, &Domain::oldest, &Entry::next, &Entry::prev>(id); }

void BlockTable::link_oldest(std::uint32_t id) { link<&Domain::oldest, &Domain::newest, &Entry::prev, &Entry::next>(id); }

void BlockTable::unlink(std::uint32_t id) {
    Entry& entry = entries_[id];
    if (order_) order_->unevictable(id, entry.domain);
    Domain& domain = domains_[entry.domain];
    if (entry.prev != kNoEntry)
        entries_[entry.prev].next = entry.next;
    else
        domain.oldest = entry.next + 1;  // kNoEntry becomes 0, an empty list
    if (entry.next != kNoEntry)
        entries_[entry.next].prev = entry.prev;
    else
        domain.newest = entry.prev + 1;
    entry.prev = entry.next = kNoEntry;
    --domain.linked;
}

void BlockTable::commit(Entries entries) {
    stage(entries, [&](const Entry& entry, std::size_t i) {
        require_distinct(entry, entries, i);
        require_state(entry, entries, i, kWriting);
    });
    for (const std::uint32_t id : entries) {
        Entry& entry = unstage(id);
        set_state(entry, kReady);
        if (entry.pins == 0) link_newest(id);
    }
}

void BlockTable::begin_evict(Entries entries) {
    stage(entries, [&](const Entry& entry, std::size_t i) {
        require_distinct(entry, entries, i);
        require_state(entry, entries, i, kReady);
        if (entry.pins != 0) refuse("entries[", i, "] is ", entries[i], ", which has ", entry.pins, " pins");
    });
    for (const std::uint32_t id : entries) {
        unlink(id);
        set_state(unstage(id), kEvicting);
    }
}

void BlockTable::condemn(Entries entries) {
    stage(entries, [&](const Entry& entry, std::size_t i) {
        require_distinct(entry, entries, i);
        require_state(entry, entries, i, kReady);
    });
    for (const std::uint32_t id : entries) {
        if (entries_[id].pins == 0) unlink(id);
        set_state(unstage(id), kEvicting);
    }
}

void BlockTable::remove(Entries entries) {
    stage(entries, [&](const Entry& entry, std::size_t i) {
        require_distinct(entry, entries, i);
        if (entry.state == kReady)
            refuse("entries[", i, "] is ", entries[i], ", which is READY; expected WRITING or EVICTING");
        if (entry.pins != 0) refuse("entries[", i, "] is ", entries[i], ", which has ", entry.pins, " pins");
        index_.prefetch(key_hash_(entry.space, entry.hash));
        slot_map_.prefetch_record(entry.first_record);
    });
    for (const std::uint32_t id : entries) {
        Entry& entry = unstage(id);
        if (const Published* const published = published_of(entry.space); published != nullptr && id < published->seen)
            published->page->remove(published->page->place(entry.hash));
        index_.erase(key_hash_(entry.space, entry.hash), id);
        slot_map_.remove_chain(entry.first_record);
        const auto space = spaces_.find(entry.space);
        if (--space->second == 0) spaces_.erase(space);
        --domains_[entry.domain].live;
        if (order_) order_->removed(id, key_hash_.wide(entry.space, entry.hash), entry.domain);
        set_state(entry, kAbsent);
        --states_[kAbsent];  // free entries are not counted
        entry.first_record = 0;
        entry.flags = 0;
        ++entry.generation;
        entry.next = free_;
        free_ = id;
    }
}

void BlockTable::pin(Entries entries) {
    stage(entries, [&](const Entry& entry, std::size_t i) {
        if (entry.pins + entry.staged >= kPinsMax)
            refuse("entries[", i, "] is ", entries[i], ", which would have more than ", kPinsMax, " pins");
    });
    for (const std::uint32_t id : entries) {
        Entry& entry = unstage(id);
        if (evictable(entry)) unlink(id);
        ++entry.pins;
    }
}

void BlockTable::unpin(Entries entries) {
    stage(entries, [&](const Entry& entry, std::size_t i) {
        if (entry.staged >= entry.pins)
            refuse("entries[", i, "] is ", entries[i], ", which has ", entry.pins,
                   " pins; the batch takes away more than that");
    });
    for (const std::uint32_t id : entries) {
        Entry& entry = unstage(id);
        --entry.pins;
        if (evictable(entry)) link_newest(id);
    }
}

void BlockTable::touch(Entries entries) {
    for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
    for (const std::uint32_t id : entries)
        if (evictable(entries_[id])) {
            unlink(id);
            link_newest(id);
        }
}

void BlockTable::cool(Entries entries) {
    for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
    for (const std::uint32_t id : entries)
        if (evictable(entries_[id])) {
            unlink(id);
            link_oldest(id);
            if (order_) order_->cooled(id, entries_[id].domain);
        }
}

void BlockTable::asked(std::uint32_t space, std::uint16_t domain, std::span<const std::uint8_t> hashes, Tables below) {
    if (!order_) return;
    const std::size_t n = hashes.size() / kHashBytes;
    std::vector<std::uint64_t> keys(n);
    for (std::size_t i = 0; i < n; ++i) keys[i] = key_hash_.wide(space, hashes.data() + i * kHashBytes);
    std::vector<ReuseOrder::Below> there;
    for (BlockTable* const table : below)
        if (table->order_)
            if (auto found = table->of_one_domain(space, hashes)) there.push_back({table->order_.get(), found->first, std::move(found->second)});
    std::vector<std::uint32_t> entries(n);
    std::vector<std::uint8_t> states(n);
    lookup(space, hashes, entries.data(), states.data());
    for (std::uint32_t& id : entries)
        if (id != kNoEntry && entries_[id].domain != domain) id = kNoEntry;
    order_->asked(domain, keys, entries, there);
}

// The entries of these keys that have the domain of the first one that is there, and kNoEntry for the others; nothing if none
// is there.
std::optional<std::pair<std::uint16_t, std::vector<std::uint32_t>>> BlockTable::of_one_domain(
    std::uint32_t space, std::span<const std::uint8_t> hashes) const {
    std::vector<std::uint32_t> entries(hashes.size() / kHashBytes);
    std::vector<std::uint8_t> states(entries.size());
    lookup(space, hashes, entries.data(), states.data());
    const auto first = std::find_if(entries.begin(), entries.end(), [](std::uint32_t id) { return id != kNoEntry; });
    if (first == entries.end()) return std::nullopt;
    const std::uint16_t domain = entries_[*first].domain;
    for (std::uint32_t& id : entries)
        if (id != kNoEntry && entries_[id].domain != domain) id = kNoEntry;
    return std::pair{domain, std::move(entries)};
}

void BlockTable::asked_each(Entries entries, Tables below) {
    for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
    if (!order_) return;
    for (const std::uint32_t id : entries) {
        const Entry& entry = entries_[id];
        const std::uint64_t key = key_hash_.wide(entry.space, entry.hash);
        std::vector<ReuseOrder::Below> there;
        for (BlockTable* const table : below)
            if (table->order_)
                if (auto found = table->of_one_domain(entry.space, {entry.hash, kHashBytes}))
                    there.push_back({table->order_.get(), found->first, std::move(found->second)});
        order_->asked(entry.domain, {&key, 1}, {&id, 1}, there);
    }
}

void BlockTable::rank(std::size_t history_blocks) {
    rank_by(std::make_unique<ReuseOrder>(entries_.size(), history_blocks));
}

void BlockTable::rank_below(const BlockTable& above) {
    if (!above.order_) refuse("the table above does not rank");
    rank_by(std::make_unique<ReuseOrder>(entries_.size(), *above.order_));
}

void BlockTable::rank_by(std::unique_ptr<ReuseOrder> order) {
    order_ = std::move(order);
    for (std::uint32_t id = 0; id < used_; ++id)
        if (const Entry& entry = entries_[id]; entry.state != kAbsent) order_->created(id, key_hash_.wide(entry.space, entry.hash));
    for (std::size_t domain = 0; domain < domains_.size(); ++domain) {
        std::uint32_t age = domains_[domain].linked;
        for (std::uint32_t id = domains_[domain].oldest - 1; id != kNoEntry; id = entries_[id].next, --age) {
            order_->aged(id, age);
            order_->evictable(id, static_cast<std::uint16_t>(domain));
        }
    }
}

void BlockTable::chained(Entries entries) {
    for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
    if (!order_) return;
    for (std::size_t first = 0, end; first < entries.size(); first = end) {
        const std::uint16_t domain = entries_[entries[first]].domain;
        for (end = first + 1; end < entries.size() && entries_[entries[end]].domain == domain; ++end) {
        }
        order_->chained(entries.subspan(first, end - first), domain);
    }
}

std::size_t BlockTable::admitted(std::uint16_t domain, Entries entries, std::size_t free) const {
    for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
    return ranked() ? order_->admitted(domain, *order_, entries, free) : entries.size();
}

std::size_t BlockTable::admitted_of(std::uint16_t domain, const BlockTable& above, Entries entries, std::size_t free) const {
    for (std::size_t i = 0; i < entries.size(); ++i) above.live(entries, i);
    return ranked() && above.order_ ? order_->admitted(domain, *above.order_, entries, free) : entries.size();
}

void BlockTable::same_as(Entries entries, const BlockTable& above, Entries of) {
    if (entries.size() != of.size()) refuse("of has ", of.size(), " elements; expected one for each of the ", entries.size(), " entries");
    for (std::size_t i = 0; i < entries.size(); ++i) {
        if (live(entries, i).state != kWriting) refuse("entries[", i, "] is ", entries[i], ", which is not WRITING");
        above.live(of, i);
    }
    if (!order_ || !above.order_) return;
    for (std::size_t i = 0; i < entries.size(); ++i) {
        order_->same_as(entries[i], *above.order_, of[i]);
        // What comes before it may be in another table of this level, or not in the one above any more.
        std::uint32_t parent = of[i];
        for (std::size_t steps = 0; steps < kParentsTried && (parent = above.order_->parent(parent)) != kNoEntry; ++steps) {
            const Entry& before = above.entries_[parent];
            const auto found = of_one_domain(before.space, {before.hash, kHashBytes});
            if (!found || found->first != entries_[entries[i]].domain) continue;
            const std::uint32_t both[] = {found->second[0], entries[i]};
            order_->chained(both, found->first);
            break;
        }
    }
}

std::size_t BlockTable::victims(std::uint16_t domain, std::size_t n, std::uint32_t* out) const {
    if (ranked()) return order_->victims(domain, n, out);
    std::size_t found = 0;
    for (std::uint32_t id = domains_[domain].oldest - 1; id != kNoEntry && found < n; id = entries_[id].next)
        out[found++] = id;
    return found;
}

std::size_t BlockTable::coldest(std::uint16_t domain, std::size_t n, std::uint16_t without_flags, std::size_t horizon,
                                std::uint32_t* out) const {
    std::size_t found = 0, seen = 0;
    for (std::uint32_t id = domains_[domain].oldest - 1; id != kNoEntry && found < n && seen < horizon;
         id = entries_[id].next, ++seen)
        if ((entries_[id].flags & without_flags) == 0) out[found++] = id;
    return found;
}

void BlockTable::set_flags(Entries entries, std::uint16_t flags) {
    for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
    for (const std::uint32_t id : entries) entries_[id].flags = (entries_[id].flags | flags) & kFlags;
}

void BlockTable::clear_flags(Entries entries, std::uint16_t flags) {
    for (std::size_t i = 0; i < entries.size(); ++i) live(entries, i);
    for (const std::uint32_t id : entries) entries_[id].flags = entries_[id].flags & ~flags & kFlags;
}

// --- slots ---------------------------------------------------------------------------------------------------------------

void BlockTable::attach_slots(Entries entries, const std::uint32_t* slots, std::size_t world) {
    if (world == 0) refuse("slots has rows of 0 elements; expected one for each shard");
    stage(entries, [&](const Entry& entry, std::size_t i) {
        require_distinct(entry, entries, i);
        require_state(entry, entries, i, kWriting);
        if (entry.first_record != 0) refuse("entries[", i, "] is ", entries[i], ", which has its slots already");
    });
    for (const std::uint32_t id : entries) unstage(id);
    slot_map_.reserve(entries.size() * world);
    std::size_t i = 0;
    try {
        // A slot may come twice in the batch, so whether it is free shows when it is added. A refusal undoes all of that.
        for (; i < entries.size(); ++i) {
            if (i + kAhead < entries.size()) slot_map_.prefetch(slots[(i + kAhead) * world]);
            Entry& entry = entries_[entries[i]];
            std::uint32_t last = 0;
            for (std::size_t shard = 0; shard < world; ++shard) {
                const std::uint32_t slot = slots[i * world + shard];
                if (slot == kNoSlot || slot >= pool_pages_)
                    refuse("slots[", i, ", ", shard, "] is ", slot, "; expected 1 to ", pool_pages_ - 1);
                if (const std::uint32_t taken = slot_map_.find(slot); taken != 0)
                    refuse("slots[", i, ", ", shard, "] is ", slot, ", which belongs to entry ", slot_map_[taken].entry);
                const std::uint32_t record = slot_map_.add(slot, entries[i]);
                if (last == 0)
                    entry.first_record = record;
                else
                    slot_map_.link(last, record);
                last = record;
            }
        }
    } catch (...) {
        for (std::size_t k = 0; k <= i; ++k) {
            Entry& entry = entries_[entries[k]];
            slot_map_.remove_chain(entry.first_record);
            entry.first_record = 0;
        }
        throw;
    }
}

std::vector<std::uint32_t> BlockTable::slots_of(const Entry& entry) const {
    std::vector<std::uint32_t> slots;
    for (std::uint32_t record = entry.first_record; record != 0; record = slot_map_[record].next_of_entry)
        slots.push_back(slot_map_[record].slot);
    return slots;
}

void BlockTable::slots(Entries entries, std::size_t world, std::uint32_t* out) const {
    if (world == 0) refuse("world is 0; expected the number of shards");
    for (std::size_t i = 0; i < entries.size(); ++i) {
        const Entry& entry = live(entries, i);
        std::size_t shard = 0;
        for (std::uint32_t record = entry.first_record; record != 0; record = slot_map_[record].next_of_entry) {
            if (shard < world) out[i * world + shard] = slot_map_[record].slot;
            ++shard;
        }
        if (shard == 0) {
            std::fill_n(out + i * world, world, kNoSlot);
        } else if (shard != world) {
            refuse("entries[", i, "] is ", entries[i], ", which has ", shard, " slots; world is ", world);
        }
    }
}

void BlockTable::owners(std::span<const std::uint32_t> slots, std::uint32_t* out) const {
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (i + kAhead < slots.size()) slot_map_.prefetch(slots[i + kAhead]);
        if (slots[i] == kNoSlot || slots[i] >= pool_pages_)
            refuse("slots[", i, "] is ", slots[i], "; expected 1 to ", pool_pages_ - 1);
        const std::uint32_t record = slot_map_.find(slots[i]);
        out[i] = record == 0 ? kNoEntry : slot_map_[record].entry;
    }
}

// --- pages for clients ---------------------------------------------------------------------------------------------------

BlockTable::Published* BlockTable::published_of(std::uint32_t space) {
    if (published_.empty()) return nullptr;
    const auto found = published_.find(space);
    return found == published_.end() ? nullptr : &found->second;
}

void BlockTable::publish(std::uint32_t space, std::shared_ptr<IndexPage> page) {
    if (!published_.try_emplace(space, Published{std::move(page), 0}).second) refuse("space ", space, " has a page already");
}

bool BlockTable::publish_more(std::uint32_t space, std::size_t n) {
    Published* const published = published_of(space);
    if (published == nullptr) refuse("space ", space, " has no page");
    if (published->seen == kAllSeen) return true;
    const std::uint32_t end = published->seen + static_cast<std::uint32_t>(std::min<std::size_t>(n, used_ - published->seen));
    for (std::uint32_t id = published->seen; id < end; ++id)
        if (entries_[id].state != kAbsent && entries_[id].space == space)
            published->page->add(published->page->place(entries_[id].hash));
    published->seen = end == used_ ? kAllSeen : end;
    return end == used_;
}

void BlockTable::withdraw(std::uint32_t space) {
    if (published_.erase(space) == 0) refuse("space ", space, " has no page");
}

// --- the whole -----------------------------------------------------------------------------------------------------------

std::size_t BlockTable::count(std::uint32_t space) const {
    const auto found = spaces_.find(space);
    return found == spaces_.end() ? 0 : found->second;
}

std::vector<std::uint32_t> BlockTable::entries_of(std::uint32_t space) const {
    std::vector<std::uint32_t> found;
    const std::size_t expected = count(space);
    found.reserve(expected);
    for (std::uint32_t id = 0; found.size() < expected; ++id)
        if (entries_[id].state != kAbsent && entries_[id].space == space) found.push_back(id);
    return found;
}

std::size_t BlockTable::ready_among(std::uint32_t space, std::size_t first, std::size_t n,
                                    std::vector<std::uint32_t>& found) const {
    if (count(space) == 0 || first >= used_) return entries_.size();
    const auto end = static_cast<std::uint32_t>(first + std::min<std::size_t>(n, used_ - first));
    for (auto id = static_cast<std::uint32_t>(first); id < end; ++id)
        if (entries_[id].state == kReady && entries_[id].space == space) found.push_back(id);
    return end == used_ ? entries_.size() : end;
}

BlockTable::Stats BlockTable::stats() const {
    Stats stats{states_[kWriting], states_[kReady], states_[kEvicting], entries_.size(), 0, {}};
    stats.bytes = entries_.bytes() + index_.bytes() + slot_map_.bytes() + domains_.bytes();
    if (order_) stats.bytes += order_->bytes();
    for (std::size_t domain = 0; domain < kDomains; ++domain)
        if (domains_[domain].live != 0) stats.domains[static_cast<std::uint16_t>(domain)] = domains_[domain].live;
    return stats;
}

}  // namespace kvtier
