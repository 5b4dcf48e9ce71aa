// Slot records of a pool file: the only code that changes a slot's state word.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pool_format.hpp"

namespace kvtier::pool {

// An extent in use, as its header describes it. It is made only after the header was checked against the geometry.
struct Extent {
    std::uint64_t index;
    std::uint64_t offset;  // in the file
    std::uint64_t slot_bytes;
    std::uint64_t stride;
    std::uint64_t count;
    std::uint64_t data_offset;  // in the extent

    std::uint64_t record_offset(std::uint64_t slot) const { return offset + page_bytes + slot * record_bytes; }
    std::uint64_t slot_offset(std::uint64_t slot) const { return offset + data_offset + slot * stride; }
};

// What a scan found: one row for each slot that is not FREE, and one for each extent in use.
struct Scan {
    std::vector<std::uint32_t> extents, broken_extents;
    std::vector<std::uint64_t> extent_slot_bytes, extent_slots;

    std::vector<std::uint32_t> slots;
    std::vector<std::uint8_t> states, intact;
    std::vector<std::uint16_t> writers;
    std::vector<std::uint64_t> generations, nonces, transfers, clocks;
    std::vector<std::uint8_t> namespaces, hashes;  // 16 and 32 bytes per row
    std::vector<std::uint32_t> data_bytes;
    std::vector<std::uint16_t> groups, shards, worlds;
    std::vector<std::uint64_t> space_keys, block_keys, copy_keys;
};

struct OpenFields {
    std::uint16_t writer, group, shard, world;
    std::uint32_t data_bytes;
    std::uint64_t boot_nonce, transfer;
    const std::uint8_t* name;    // namespace digest, 16 bytes
    const std::uint8_t* hashes;  // 32 bytes per slot
};

class Records;

// READY slots of another pool (or of the same), as many as the call has slots.
struct Source {
    const Records& records;
    std::span<const std::uint32_t> slots;
    const std::uint64_t* generations;
};

// What became of a slot that should take over the data checksum of another.
enum Accepted : std::uint8_t { accepted_not, accepted, accepted_other_data };

// Works on the bytes of a whole pool file. Since they may be garbage, everything read from them is checked each time before it
// is used as an offset. Batch calls check every slot first, and throw std::invalid_argument with nothing changed.
class Records {
public:
    // Checks the header against the size. With crash_after = n, the process kills itself right after its nth persisted step.
    Records(std::uint8_t* base, std::uint64_t size, std::uint64_t crash_after);

    // Writes the header of a pool file whose other bytes are zero. `encrypted`: of a slab that is to hold ciphertext. Only the
    // first `populated` extents have memory, and the others are not touched.
    static void format(std::uint8_t* base, std::uint64_t size, std::uint64_t extent_bytes, std::uint64_t extents,
                       const std::uint8_t* digest, std::uint64_t crash_after, bool encrypted, std::uint64_t populated);

    void open(std::span<const std::uint32_t> slots, const OpenFields& fields, std::uint64_t* generations);
    void set_data_checksums(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const std::uint64_t* sums);
    // Of an encrypted slab: notes in WRITING records that nobody has claimed yet with which salt (48 bits, not 0) their data will
    // be encrypted. So no generation of a slot is ever encrypted twice.
    void claim(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::uint64_t salt, std::uint8_t* out);
    // Of an encrypted slab: sets the masked data checksums and the tags, 16 bytes for each slot, of claimed WRITING records.
    void set_tags(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const std::uint64_t* sums,
                   const std::uint8_t* tags);
    // Copies the records' words as they are, 16 for each slot.
    void copies(std::span<const std::uint32_t> slots, std::uint64_t* out) const;
    void commit(std::span<const std::uint32_t> slots, const std::uint64_t* clocks);
    void free(std::span<const std::uint32_t> slots);

    void generations(std::span<const std::uint32_t> slots, std::uint64_t* out) const;
    // Covers everything that this thread has read from the slots before: they were then what is found now.
    void check(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::optional<std::uint64_t> data_bytes,
               std::uint8_t* out) const;
    void check_writing(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::optional<std::uint64_t> data_bytes,
                       std::uint8_t* out) const;
    void verify_data(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::uint8_t* out) const;

    // Compares records of two pools: one here, WRITING, and a READY one in `source`, of the same shard of the same block.
    void match(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const Source& source, std::uint8_t* out) const;
    // Where they match, this record takes over the source's data checksum.
    void adopt(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const Source& source, std::uint8_t* out);
    // Where they match, and `sums`, of the data in this slot, is the source's data checksum, this record takes it over.
    void accept(std::span<const std::uint32_t> slots, const std::uint64_t* generations, const Source& source,
                const std::uint64_t* sums, std::uint8_t* out);

    void data_bytes(std::span<const std::uint32_t> slots, std::uint64_t* out) const;
    void data_sums(std::span<const std::uint32_t> slots, const std::uint64_t* generations, std::uint64_t* sums,
                   std::uint8_t* ok) const;
    // File offsets of the pages that hold the slots' records, each once, ascending.
    std::vector<std::uint64_t> record_pages(std::span<const std::uint32_t> slots) const;
    // File offset and bytes of an extent's slot table.
    std::pair<std::uint64_t, std::uint64_t> table_range(std::uint64_t extent) const;

    void format_extent(std::uint64_t extent, std::uint64_t slot_bytes);
    bool extent(std::uint64_t index, Extent& out) const;  // false: not in use, without memory, or its header cannot be believed
    Scan scan() const;
    std::uint64_t start_boot(std::uint64_t nonce);

    std::uint64_t persisted_steps() const { return steps_.load(std::memory_order_relaxed); }
    std::uint64_t extents() const { return extents_; }
    std::uint64_t extent_bytes() const { return extent_bytes_; }
    std::uint64_t boots() const;
    // How many extents, from the first on, have memory. The others are never touched: a touch would have the kernel find memory
    // for them, or kill the process.
    std::uint64_t populated() const;
    void set_populated(std::uint64_t extents);
    bool encrypted() const { return encrypted_; }

private:
    struct Place {
        Extent extent;
        std::uint64_t slot;  // in the extent
        std::uint64_t* record;
    };
    bool locate(std::uint32_t slot, Place& place) const;
    Place require(std::uint32_t slot) const;
    std::vector<Place> require_all(std::span<const std::uint32_t> slots) const;
    bool intact(const std::uint64_t* record, const Extent& extent) const;
    void require_encrypted() const;
    bool read_ready(std::uint32_t slot, std::uint64_t generation, Place& place, std::uint64_t* record) const;
    bool match_one(std::uint32_t slot, std::uint64_t generation, const Source& source, std::size_t i, Place& place,
                   std::uint64_t* source_record) const;
    std::uint64_t* words(std::uint64_t offset) const { return reinterpret_cast<std::uint64_t*>(base_ + offset); }
    void step();

    std::uint8_t* base_;
    std::uint64_t crash_after_;
    std::uint64_t extent_bytes_ = 0;
    std::uint64_t extents_ = 0;
    bool encrypted_ = false;
    std::atomic<std::uint64_t> steps_{0};
};

}  // namespace kvtier::pool
