// The validator of BlockTable, which compares every structure with every other.
#include <vector>

#include "block_table.hpp"
#include "refuse.hpp"

namespace kvtier {

std::string BlockTable::check() const {
    std::size_t live_count = 0, with_slots = 0, evictable_count = 0, indexed = 0, linked = 0;
    std::size_t by_state[4] = {0, 0, 0, 0};
    std::unordered_map<std::uint32_t, std::size_t> by_space;
    std::vector<std::uint32_t> by_domain(kDomains, 0);

    for (std::uint32_t id = 0; id < used_; ++id) {
        const Entry& entry = entries_[id];
        if (entry.staged != 0) return text("entry ", id, " is still staged");
        if (entry.state > kEvicting) return text("entry ", id, " has state ", static_cast<int>(entry.state));
        if (entry.state == kAbsent) continue;
        ++live_count;
        ++by_state[entry.state];
        ++by_space[entry.space];
        ++by_domain[entry.domain];
        evictable_count += evictable(entry);
        if (entry.pins > kPinsMax) return text("entry ", id, " has ", entry.pins, " pins");
        const std::uint32_t tag = key_hash_(entry.space, entry.hash);
        const std::uint32_t found = index_.find(tag, [&](std::uint32_t other) { return same(other, entry.space, entry.hash); });
        if (found != id) return text("the key of entry ", id, " leads to entry ", found);
        for (std::uint32_t record = entry.first_record; record != 0; record = slot_map_[record].next_of_entry) {
            const SlotMap::Record& shard = slot_map_[record];
            if (shard.entry != id) return text("slot ", shard.slot, " of entry ", id, " names entry ", shard.entry);
            if (shard.slot == kNoSlot || shard.slot >= pool_pages_) return text("entry ", id, " has slot ", shard.slot);
            if (slot_map_.find(shard.slot) != record) return text("slot ", shard.slot, " leads to another record");
            if (++with_slots > slot_map_.used()) return text("the slots of entry ", id, " form a ring");
        }
    }
    for (std::uint8_t state = kWriting; state <= kEvicting; ++state)
        if (by_state[state] != states_[state])
            return text(states_[state], " entries counted as ", state_name(state), "; there are ", by_state[state]);
    for (const auto& [space, published] : published_)
        if (published.seen != kAllSeen && published.seen > used_) return text("the page of space ", space, " is ahead of the table");
    if (by_space != spaces_) return "the counts per space do not match the entries";
    if (with_slots != slot_map_.count()) return text(slot_map_.count(), " slots owned; entries have ", with_slots);
    if (slot_map_.free_count() + slot_map_.count() != slot_map_.used()) return "slot records were lost";

    std::string problem;
    index_.each([&](std::uint32_t tag, std::uint32_t id) {
        ++indexed;
        if (id >= used_ || entries_[id].state == kAbsent)
            problem = text("the index names entry ", id, ", which is not live");
        else if (key_hash_(entries_[id].space, entries_[id].hash) != tag)
            problem = text("the index has a wrong tag for entry ", id);
    });
    if (!problem.empty()) return problem;
    if (indexed != live_count) return text("the index has ", indexed, " entries; ", live_count, " are live");

    std::size_t free_count = 0;
    for (std::uint32_t id = free_; id != kNoEntry; id = entries_[id].next) {
        if (id >= used_ || entries_[id].state != kAbsent) return text("the free list holds entry ", id);
        if (++free_count > used_) return "the free list is a ring";
    }
    if (free_count + live_count != used_) return text(used_ - live_count, " entries are free; the list has ", free_count);

    for (std::size_t number = 0; number < kDomains; ++number) {
        const Domain& domain = domains_[number];
        if (domain.live != by_domain[number])
            return text("domain ", number, " counts ", domain.live, " blocks; there are ", by_domain[number]);
        std::size_t length = 0;
        std::uint32_t previous = kNoEntry;
        for (std::uint32_t id = domain.oldest - 1; id != kNoEntry; previous = id, id = entries_[id].next) {
            const Entry& entry = entries_[id];
            if (id >= used_ || !evictable(entry)) return text("entry ", id, " is linked but not evictable");
            if (entry.domain != number) return text("entry ", id, " is linked in domain ", number);
            if (entry.prev != previous) return text("entry ", id, " has a wrong predecessor");
            if (++length > used_) return text("the order of domain ", number, " is a ring");
        }
        if (domain.newest - 1 != previous) return text("domain ", number, " names a wrong newest entry");
        if (length != domain.linked) return text("domain ", number, " counts ", domain.linked, " linked; found ", length);
        linked += length;
    }
    if (linked != evictable_count) return text(evictable_count, " entries are evictable; ", linked, " are linked");
    if (order_)
        return order_->check(used_, [&](std::uint32_t id) { return evictable(entries_[id]); });
    return {};
}

}  // namespace kvtier
