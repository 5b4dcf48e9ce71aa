#include "pool_records.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "checksum.hpp"
#include "refuse.hpp"

namespace kvtier::pool {
namespace {

// Every word of a header or record is read and written as one atomic 8-byte word, with acquire and release, because other
// processes read them: one that sees a changed byte must also see the state word that announced it.
std::uint64_t load(const std::uint64_t* word) {
    return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(word)).load(std::memory_order_acquire);
}
void store(std::uint64_t* word, std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_release);
}

// Comes between reading a slot's data and asking its record whether they were what it says: an acquire load alone lets
// earlier, plain reads of the data happen after it (not on x86, but on other processors).
void after_data() { std::atomic_thread_fence(std::memory_order_acquire); }

void copy_record(const std::uint64_t* record, std::uint64_t* out) {
    for (unsigned i = 0; i < record_words; ++i) out[i] = load(record + i);
}

// Bytes 8-103 of the record, then the generation as 8 bytes.
std::uint64_t checksum_of_record(const std::uint64_t* record, std::uint64_t generation) {
    std::uint64_t covered[record_checksum];
    std::memcpy(covered, record + 1, (record_checksum - 1) * 8);
    covered[record_checksum - 1] = generation;
    return xxh3_64(covered, sizeof covered);
}

std::uint64_t checksum_of_extent(const std::uint64_t* header) {
    std::uint64_t covered[extent_checksum];
    std::memcpy(covered, header, sizeof covered);
    covered[extent_magic] = magic_extent;
    return xxh3_64(covered, sizeof covered);
}

std::uint32_t data_bytes_of(const std::uint64_t* record) { return static_cast<std::uint32_t>(record[record_bytes_group]); }
std::uint16_t group_of(const std::uint64_t* record) { return static_cast<std::uint16_t>(record[record_bytes_group] >> 32); }
std::uint16_t shard_of(const std::uint64_t* record) { return static_cast<std::uint16_t>(record[record_bytes_group] >> 48); }
std::uint16_t world_of(const std::uint64_t* record) { return static_cast<std::uint16_t>(record[record_world]); }

std::string name_of(std::uint64_t word) {
    static constexpr const char* names[] = {"FREE", "WRITING", "READY"};
    const unsigned state = state_of(word);
    return text(state <= state_ready ? names[state] : text("state ", state), " (generation ", generation_of(word), ", writer ",
                writer_of(word), ")");
}

[[noreturn]] void unexpected(std::uint32_t slot, const std::string& expected, std::uint64_t found) {
    refuse("slot ", slot, ": expected ", expected, ", found ", name_of(found));
}

void require_distinct(std::span<const std::uint32_t> slots) {
    if (std::adjacent_find(slots.begin(), slots.end(), std::greater_equal<>()) == slots.end()) return;  // strictly ascending
    std::vector<std::uint32_t> sorted(slots.begin(), slots.end());
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) refuse("slot ", *twice, ": expected once in a batch, found twice");
}

void check_geometry(std::uint64_t size, std::uint64_t extent_bytes, std::uint64_t extents) {
    if (extent_bytes < extent_bytes_min || extent_bytes > extent_bytes_max || (extent_bytes & (extent_bytes - 1)))
        refuse("extent_bytes ", extent_bytes, ": expected a power of two from 1 MiB to 1 GiB");
    if (size < header_area_bytes || extents == 0 || extents > (size - header_area_bytes) / extent_bytes)
        refuse(extents, " extents of ", extent_bytes, " bytes and the header do not fit a pool of ", size, " bytes");
    if (extents > ((std::uint64_t{1} << 32) * page_bytes - header_area_bytes) / extent_bytes)
        refuse("a pool is at most 16 TiB: slots are named by 32-bit page numbers");
}

void check_base(const std::uint8_t* base) {
    if (reinterpret_cast<std::uintptr_t>(base) % 8) refuse("the pool must be aligned to 8 bytes");
}

[[noreturn]] void die() {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

}  // namespace

Records::Records(std::uint8_t* base, std::uint64_t size, std::uint64_t crash_after) : base_(base), crash_after_(crash_after) {
    check_base(base);
    if (size < header_area_bytes) refuse("a pool of ", size, " bytes has no header");
    const std::uint64_t* header = words(0);
    if (load(header) != magic_pool) refuse("the pool's header has not the magic of format 1");
    if (xxh3_64(header, header_checksum * 8) != header[header_checksum])
        refuse("the checksum of the pool's header does not fit");
    encrypted_ = header[header_format] == format_encrypted;
    if ((header[header_format] != format_version && !encrypted_) || header[header_first_extent] != header_area_bytes)
        refuse("the pool has format ", header[header_format], ", expected 1, or 2 for a slab that is encrypted");
    extent_bytes_ = header[header_extent_bytes];
    extents_ = header[header_extents];
    check_geometry(size, extent_bytes_, extents_);
}

void Records::format(std::uint8_t* base, std::uint64_t size, std::uint64_t extent_bytes, std::uint64_t extents,
                     const std::uint8_t* digest, std::uint64_t crash_after, bool encrypted, std::uint64_t populated) {
    check_base(base);
    check_geometry(size, extent_bytes, extents);
    if (populated == 0 || populated > extents) refuse("populated ", populated, ": expected 1 to all ", extents, " extents");
    auto* header = reinterpret_cast<std::uint64_t*>(base);
    std::uint64_t steps = 0;
    const auto step = [&] {
        if (++steps == crash_after) die();
    };
    store(header + header_magic, magic_making);
    step();
    for (std::uint64_t i = 0; i < populated; ++i) {
        auto* extent = reinterpret_cast<std::uint64_t*>(base + header_area_bytes + i * extent_bytes);
        if (*extent != 0) store(extent, 0);
    }
    std::memset(base + 8, 0, header_area_bytes - 8);
    step();
    std::uint64_t covered[header_checksum] = {magic_pool, encrypted ? format_encrypted : format_version, header_area_bytes, extent_bytes, extents};
    std::memcpy(covered + header_digest_low, digest, 16);
    for (unsigned i = header_format; i < header_checksum; ++i) store(header + i, covered[i]);
    step();
    store(header + header_missing, make_missing(extents - populated));
    store(header + header_checksum, xxh3_64(covered, sizeof covered));
    step();
    store(header + header_magic, magic_pool);
    step();
}

// Whether a READY record can be believed: its checksum matches, and its fields make sense in the extent that holds it.
bool Records::intact(const std::uint64_t* record, const Extent& extent) const {
    const std::uint64_t salt = record[record_world] >> 16;
    return record[record_checksum] == checksum_of_record(record, generation_of(record[record_word])) &&
           data_bytes_of(record) <= extent.slot_bytes && shard_of(record) < world_of(record) && (salt != 0) == encrypted_;
}

void Records::require_encrypted() const {
    if (!encrypted_) refuse("the pool has format 1: nothing in it is encrypted");
}

void Records::step() {
    const std::uint64_t done = steps_.load(std::memory_order_relaxed) + 1;
    steps_.store(done, std::memory_order_relaxed);  // exact for one thread, which is what the crash tests use
    if (done == crash_after_) die();
}

bool Records::extent(std::uint64_t index, Extent& out) const {
    if (index >= populated()) return false;
    const std::uint64_t offset = header_area_bytes + index * extent_bytes_;
    const std::uint64_t* header = words(offset);
    if (load(header) != magic_extent) return false;
    std::uint64_t copy[extent_checksum + 1];
    for (unsigned i = 0; i <= extent_checksum; ++i) copy[i] = load(header + i);
    if (copy[extent_checksum] != checksum_of_extent(copy) || copy[extent_index] != index) return false;
    const std::uint64_t count = slots_per_extent(extent_bytes_, copy[extent_slot_bytes]);
    if (count == 0 || copy[extent_count] != count || copy[extent_stride] != stride_of(copy[extent_slot_bytes]) ||
        copy[extent_data_offset] != data_offset_of(count))
        return false;
    out = {index, offset, copy[extent_slot_bytes], copy[extent_stride], count, copy[extent_data_offset]};
    return true;
}

bool Records::locate(std::uint32_t slot, Place& place) const {
    const std::uint64_t offset = std::uint64_t{slot} * page_bytes;
    if (offset < header_area_bytes) return false;
    if (!extent((offset - header_area_bytes) / extent_bytes_, place.extent)) return false;
    const std::uint64_t first = place.extent.slot_offset(0);
    if (offset < first || (offset - first) % place.extent.stride) return false;
    place.slot = (offset - first) / place.extent.stride;
    if (place.slot >= place.extent.count) return false;
    place.record = words(place.extent.record_offset(place.slot));
    return true;
}

Records::Place Records::require(std::uint32_t slot) const {
    Place place;
    if (!locate(slot, place)) refuse("slot ", slot, ": expected the first page of a slot of an extent in use, found none there");
    return place;
}

std::vector<Records::Place> Records::require_all(std::span<const std::uint32_t> slots) const {
    require_distinct(slots);
    std::vector<Place> places;
    places.reserve(slots.size());
    for (const std::uint32_t slot : slots) places.push_back(require(slot));
    return places;
}

void Records::open(std::span<const std::uint32_t> slots, const OpenFields& fields, std::uint64_t* generations) {
    if (fields.writer == 0) refuse("writer 0 is nobody: register the writer first");
    if (fields.shard >= fields.world)
        refuse("shard ", fields.shard, ": expected one below the world size, ", fields.world);
    const auto places = require_all(slots);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::uint64_t word = load(places[i].record);
        if (state_of(word) != state_free) unexpected(slots[i], "FREE", word);
        if (fields.data_bytes > places[i].extent.slot_bytes)
            refuse("slot ", slots[i], ": expected at most ", places[i].extent.slot_bytes, " data bytes, found ", fields.data_bytes);
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
        std::uint64_t* record = places[i].record;
        const std::uint64_t generation = (generation_of(load(record)) + 1) & generation_mask;
        store(record, make_word(state_writing, fields.writer, generation));
        step();
        std::uint64_t named[record_words] = {};
        named[record_nonce] = fields.boot_nonce;
        named[record_transfer] = fields.transfer;
        std::memcpy(named + record_namespace, fields.name, 16);
        std::memcpy(named + record_hash, fields.hashes + i * 32, 32);
        named[record_bytes_group] =
            fields.data_bytes | std::uint64_t{fields.group} << 32 | std::uint64_t{fields.shard} << 48;
        named[record_world] = fields.world;
        for (unsigned w = record_nonce; w < record_bytes_group; ++w) store(record + w, named[w]);
        step();
        for (unsigned w = record_bytes_group; w < record_words; ++w) store(record + w, named[w]);
        step();
        generations[i] = generation;
    }
}

void Records::set_data_checksums(std::span<const std::uint32_t> slots, const std::uint64_t* generations,
                                 const std::uint64_t* sums) {
    const auto places = require_all(slots);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::uint64_t word = load(places[i].record);
        if (state_of(word) != state_writing || generation_of(word) != generations[i])
            unexpected(slots[i], text("WRITING with generation ", generations[i]), word);
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
        store(places[i].record + record_data_checksum, sums[i]);
        step();
    }
}

void Records::claim(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::uint64_t salt,
                    std::uint8_t* out) {
    require_encrypted();
    if (salt == 0 || salt > salt_mask) refuse("salt ", salt, ": expected 1 to 2^48 - 1");
    require_distinct(slots);
    Place place;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        out[i] = 0;
        if (!locate(slots[i], place)) continue;
        std::uint64_t unclaimed = load(place.record + record_world);
        const std::uint64_t word = load(place.record);
        if (state_of(word) != state_writing || generation_of(word) != generations[i] || unclaimed >> 16 != 0) continue;
        std::atomic_ref<std::uint64_t> world(place.record[record_world]);
        out[i] = world.compare_exchange_strong(unclaimed, unclaimed | salt << 16, std::memory_order_acq_rel);
        step();
    }
}

void Records::set_tags(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const std::uint64_t* sums,
                        const std::uint8_t* tags) {
    require_encrypted();
    set_data_checksums(slots, generations, sums);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        std::uint64_t tag[2];
        std::memcpy(tag, tags + i * sizeof tag, sizeof tag);
        const Place place = require(slots[i]);
        for (unsigned w = 0; w < 2; ++w) store(place.record + record_tag + w, tag[w]);
        step();
    }
}

void Records::copies(std::span<const std::uint32_t> slots, std::uint64_t* out) const {
    for (std::size_t i = 0; i < slots.size(); ++i) copy_record(require(slots[i]).record, out + i * record_words);
}

void Records::commit(std::span<const std::uint32_t> slots, const std::uint64_t* clocks) {
    const auto places = require_all(slots);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::uint64_t word = load(places[i].record);
        if (state_of(word) != state_writing) unexpected(slots[i], "WRITING", word);
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
        std::uint64_t* record = places[i].record;
        const std::uint64_t word = load(record);
        store(record + record_clock, clocks[i]);
        step();
        std::uint64_t copy[record_words];
        copy_record(record, copy);
        store(record + record_checksum, checksum_of_record(copy, generation_of(word)));
        step();
        store(record, make_word(state_ready, writer_of(word), generation_of(word)));
        step();
    }
}

void Records::free(std::span<const std::uint32_t> slots) {
    const auto places = require_all(slots);
    for (const Place& place : places) {
        store(place.record, make_word(state_free, 0, generation_of(load(place.record)) + 1));
        step();
    }
}

void Records::generations(std::span<const std::uint32_t> slots, std::uint64_t* out) const {
    for (std::size_t i = 0; i < slots.size(); ++i) out[i] = generation_of(load(require(slots[i]).record));
}

// Copies the record, and returns whether it stayed READY with this generation meanwhile and can be believed.
bool Records::read_ready(std::uint32_t slot, std::uint64_t generation, Place& place, std::uint64_t* record) const {
    if (!locate(slot, place)) return false;
    copy_record(place.record, record);
    const std::uint64_t word = record[record_word];
    return state_of(word) == state_ready && generation_of(word) == generation && intact(record, place.extent) &&
           load(place.record) == word;
}

void Records::check(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::optional<std::uint64_t> data_bytes,
                    std::uint8_t* out) const {
    after_data();
    Place place;
    std::uint64_t record[record_words];
    for (std::size_t i = 0; i < slots.size(); ++i)
        out[i] = read_ready(slots[i], generations[i], place, record) && data_bytes.value_or(data_bytes_of(record)) == data_bytes_of(record);
}

void Records::check_writing(std::span<const std::uint32_t> slots, const std::uint64_t* generations,
                            std::optional<std::uint64_t> data_bytes, std::uint8_t* out) const {
    Place place;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        out[i] = 0;
        if (!locate(slots[i], place)) continue;
        const std::uint64_t word = load(place.record);
        const std::uint64_t has = static_cast<std::uint32_t>(load(place.record + record_bytes_group));
        out[i] = state_of(word) == state_writing && generation_of(word) == generations[i] && data_bytes.value_or(has) == has;
    }
}

void Records::verify_data(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::uint8_t* out) const {
    Place place;
    std::uint64_t record[record_words];
    for (std::size_t i = 0; i < slots.size(); ++i) {
        out[i] = read_ready(slots[i], generations[i], place, record) &&
                 xxh3_64(base_ + place.extent.slot_offset(place.slot), data_bytes_of(record)) == record[record_data_checksum];
        after_data();
        out[i] = out[i] && load(place.record) == record[record_word];
    }
}

// Whether the slot here is WRITING with its generation, row i of the source is READY with its own, and both records name the
// same shard of the same block with as many data bytes. Fills in both.
bool Records::match_one(std::uint32_t slot, std::uint64_t generation, const Source& source, std::size_t i, Place& place,
                        std::uint64_t* source_record) const {
    Place from;
    if (!locate(slot, place) || !source.records.read_ready(source.slots[i], source.generations[i], from, source_record)) return false;
    std::uint64_t record[record_words];
    copy_record(place.record, record);
    const std::uint64_t word = record[record_word];
    // Namespace, hash, data bytes, group, shard and world size lie side by side. A salt beside the world size is only a slab's.
    if (encrypted_) record[record_world] = world_of(record);
    if (source.records.encrypted_) source_record[record_world] = world_of(source_record);
    return state_of(word) == state_writing && generation_of(word) == generation &&
           std::equal(record + record_namespace, record + record_clock, source_record + record_namespace) &&
           data_bytes_of(record) <= place.extent.slot_bytes && load(place.record) == word;
}

void Records::match(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const Source& source,
                    std::uint8_t* out) const {
    after_data();
    Place place;
    std::uint64_t found[record_words];
    for (std::size_t i = 0; i < slots.size(); ++i) out[i] = match_one(slots[i], generations[i], source, i, place, found);
}

void Records::adopt(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const Source& source,
                    std::uint8_t* out) {
    require_distinct(slots);
    after_data();
    Place place;
    std::uint64_t found[record_words];
    for (std::size_t i = 0; i < slots.size(); ++i) {
        out[i] = match_one(slots[i], generations[i], source, i, place, found);
        if (!out[i]) continue;
        store(place.record + record_data_checksum, found[record_data_checksum]);
        step();
    }
}

void Records::accept(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const Source& source,
                     const std::uint64_t* sums, std::uint8_t* out) {
    require_distinct(slots);
    after_data();
    Place place;
    std::uint64_t found[record_words];
    for (std::size_t i = 0; i < slots.size(); ++i) {
        out[i] = accepted_not;
        if (!match_one(slots[i], generations[i], source, i, place, found)) continue;
        out[i] = sums[i] == found[record_data_checksum] ? accepted : accepted_other_data;
        if (out[i] != accepted) continue;
        store(place.record + record_data_checksum, sums[i]);
        step();
    }
}

void Records::data_bytes(std::span<const std::uint32_t> slots, std::uint64_t* out) const {
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const Place place = require(slots[i]);
        out[i] = static_cast<std::uint32_t>(load(place.record + record_bytes_group));
        if (out[i] > place.extent.slot_bytes)
            refuse("slot ", slots[i], ": expected at most ", place.extent.slot_bytes, " data bytes, found ", out[i]);
    }
}

void Records::data_sums(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::uint64_t* sums,
                        std::uint8_t* ok) const {
    Place place;
    std::uint64_t record[record_words];
    for (std::size_t i = 0; i < slots.size(); ++i) {
        ok[i] = read_ready(slots[i], generations[i], place, record);
        sums[i] = ok[i] ? record[record_data_checksum] : 0;
    }
}

std::vector<std::uint64_t> Records::record_pages(std::span<const std::uint32_t> slots) const {
    std::vector<std::uint64_t> offsets;
    offsets.reserve(slots.size());
    for (const std::uint32_t slot : slots) {
        const Place place = require(slot);
        offsets.push_back(place.extent.record_offset(place.slot) / page_bytes * page_bytes);
    }
    std::sort(offsets.begin(), offsets.end());
    offsets.erase(std::unique(offsets.begin(), offsets.end()), offsets.end());
    return offsets;
}

std::pair<std::uint64_t, std::uint64_t> Records::table_range(std::uint64_t index) const {
    if (index >= extents_) refuse("extent ", index, ": the pool has ", extents_);
    Extent found;
    if (!extent(index, found)) refuse("extent ", index, ": expected one in use, found none there");
    return {found.record_offset(0), found.data_offset - page_bytes};
}

void Records::format_extent(std::uint64_t index, std::uint64_t slot_bytes) {
    if (index >= extents_) refuse("extent ", index, ": the pool has ", extents_);
    if (index >= populated()) refuse("extent ", index, ": only ", populated(), " have memory");
    const std::uint64_t count = slots_per_extent(extent_bytes_, slot_bytes);
    if (count == 0)
        refuse("slot_bytes ", slot_bytes, ": expected 1 to ", extent_bytes_ - 2 * page_bytes, " in extents of ", extent_bytes_,
               " bytes");
    // Page numbers of old slots may name new ones, so generations go on from the highest that this extent has had.
    std::uint64_t generation = 0;
    if (Extent old; extent(index, old)) {
        for (std::uint64_t slot = 0; slot < old.count; ++slot) {
            const std::uint64_t word = load(words(old.record_offset(slot)));
            if (state_of(word) != state_free)
                unexpected(static_cast<std::uint32_t>(old.slot_offset(slot) / page_bytes), "FREE", word);
            generation = std::max(generation, generation_of(word) + 1);
        }
    }
    const std::uint64_t offset = header_area_bytes + index * extent_bytes_;
    std::uint64_t* header = words(offset);
    store(header + extent_magic, 0);
    step();
    for (std::uint64_t slot = 0; slot < count; ++slot) {
        std::uint64_t* record = words(offset + page_bytes + slot * record_bytes);
        store(record, make_word(state_free, 0, generation));
        for (unsigned w = 1; w < record_words; ++w) store(record + w, 0);
        if (slot == count / 2) step();
    }
    step();
    const std::uint64_t fields[extent_checksum] = {magic_extent, index, slot_bytes, stride_of(slot_bytes), count, data_offset_of(count)};
    for (unsigned i = extent_index; i < extent_checksum; ++i) store(header + i, fields[i]);
    step();
    store(header + extent_checksum, checksum_of_extent(fields));
    step();
    store(header + extent_magic, magic_extent);
    step();
}

std::uint64_t Records::boots() const { return load(words(0) + header_boots); }

std::uint64_t Records::populated() const { return extents_ - missing_of(load(words(0) + header_missing), extents_); }

void Records::set_populated(std::uint64_t extents) {
    if (extents < populated() || extents > extents_)
        refuse("populated ", extents, ": expected ", populated(), " or more, and at most ", extents_);
    store(words(0) + header_missing, make_missing(extents_ - extents));
    step();
}

std::uint64_t Records::start_boot(std::uint64_t nonce) {
    std::uint64_t* header = words(0);
    store(header + header_nonce, nonce);
    const std::uint64_t boots = load(header + header_boots) + 1;
    store(header + header_boots, boots);
    return boots;
}

Scan Records::scan() const {
    Scan found;
    std::vector<Extent> used;
    std::uint64_t rows = 0;
    const std::uint64_t populated = this->populated();
    for (std::uint64_t index = 0; index < populated; ++index) {
        Extent extent;
        if (!this->extent(index, extent)) {
            if (load(words(header_area_bytes + index * extent_bytes_)) != 0)
                found.broken_extents.push_back(static_cast<std::uint32_t>(index));
            continue;
        }
        used.push_back(extent);
        found.extents.push_back(static_cast<std::uint32_t>(index));
        found.extent_slot_bytes.push_back(extent.slot_bytes);
        found.extent_slots.push_back(extent.count);
        for (std::uint64_t slot = 0; slot < extent.count; ++slot)
            rows += state_of(load(words(extent.record_offset(slot)))) != state_free;
    }
    const auto reserve = [rows](auto&... columns) { (columns.reserve(rows), ...); };
    reserve(found.slots, found.states, found.intact, found.writers, found.generations, found.nonces, found.transfers, found.clocks,
            found.data_bytes, found.groups, found.shards, found.worlds, found.space_keys, found.block_keys, found.copy_keys);
    found.namespaces.reserve(rows * 16);
    found.hashes.reserve(rows * 32);
    for (const Extent& extent : used) {
        for (std::uint64_t slot = 0; slot < extent.count; ++slot) {
            const std::uint64_t* place = words(extent.record_offset(slot));
            std::uint64_t record[record_words];
            copy_record(place, record);
            const std::uint64_t word = record[record_word];
            if (state_of(word) == state_free) continue;
            const std::uint64_t place_words[] = {std::uint64_t{world_of(record)} | std::uint64_t{group_of(record)} << 16,
                                                 record[record_namespace], record[record_namespace + 1], record[record_hash],
                                                 record[record_hash + 1],  record[record_hash + 2],      record[record_hash + 3],
                                                 record[record_nonce],     record[record_transfer]};
            found.slots.push_back(static_cast<std::uint32_t>(extent.slot_offset(slot) / page_bytes));
            found.states.push_back(static_cast<std::uint8_t>(state_of(word)));
            found.intact.push_back(state_of(word) == state_ready && intact(record, extent));
            found.writers.push_back(writer_of(word));
            found.generations.push_back(generation_of(word));
            found.nonces.push_back(record[record_nonce]);
            found.transfers.push_back(record[record_transfer]);
            found.clocks.push_back(record[record_clock]);
            found.data_bytes.push_back(data_bytes_of(record));
            found.groups.push_back(group_of(record));
            found.shards.push_back(shard_of(record));
            found.worlds.push_back(world_of(record));
            found.space_keys.push_back(xxh3_64(place_words, 24));
            found.block_keys.push_back(xxh3_64(place_words, 56));
            found.copy_keys.push_back(xxh3_64(place_words, 72));
            const auto* bytes = reinterpret_cast<const std::uint8_t*>(record);
            found.namespaces.insert(found.namespaces.end(), bytes + record_namespace * 8, bytes + record_hash * 8);
            found.hashes.insert(found.hashes.end(), bytes + record_hash * 8, bytes + record_bytes_group * 8);
        }
    }
    return found;
}

}  // namespace kvtier::pool
