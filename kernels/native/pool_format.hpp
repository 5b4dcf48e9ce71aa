// The pool file, format 1: what lies where, and the arithmetic of extents. docs/design/pool.md is the contract.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier::pool {

inline constexpr std::uint64_t page_bytes = 4096;
inline constexpr std::uint64_t header_area_bytes = 2u << 20;
inline constexpr std::uint64_t extent_bytes_min = 1u << 20;
inline constexpr std::uint64_t extent_bytes_max = 1u << 30;
inline constexpr std::uint32_t format_version = 1;
// A slab whose slots hold ciphertext. Its records have a salt and a tag besides; everything else is as in format 1.
inline constexpr std::uint32_t format_encrypted = 2;

constexpr std::uint64_t magic(const char (&text)[9]) {
    std::uint64_t value = 0;
    for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(text[i]);
    return value;
}
inline constexpr std::uint64_t magic_making = magic("KVTIERP0");  // being made: nothing else in it is believed
inline constexpr std::uint64_t magic_pool = magic("KVTIERP1");
inline constexpr std::uint64_t magic_extent = magic("KVTIERX1");

// Header page, in 8-byte words. The checksum covers the words before it; those after it change while the pool is used.
enum HeaderWord : unsigned {
    header_magic,
    header_format,  // format version
    header_first_extent,
    header_extent_bytes,
    header_extents,
    header_digest_low,
    header_digest_high,
    header_checksum,
    header_boots,
    header_nonce,
    header_missing,  // extents at the end that have no memory yet, and above it the same 32 bits inverted; 0: there are none
};

// Extents without memory, as a header's word says it; `extents`, all of them, if the word makes no sense.
constexpr std::uint64_t make_missing(std::uint64_t count) { return count == 0 ? 0 : (~count & 0xffff'ffff) << 32 | count; }
constexpr std::uint64_t missing_of(std::uint64_t word, std::uint64_t extents) {
    const std::uint64_t count = word & 0xffff'ffff;
    return word == make_missing(count) && count < extents ? count : extents;
}

// Extent header page, in 8-byte words. The magic is written last and cleared first.
enum ExtentWord : unsigned {
    extent_magic,
    extent_index,
    extent_slot_bytes,
    extent_stride,
    extent_count,
    extent_data_offset,
    extent_checksum,  // covers the words before it, with the magic of an extent that is in use
};

// Slot record, in 8-byte words.
inline constexpr std::uint64_t record_bytes = 128;
inline constexpr unsigned record_words = 16;
enum RecordWord : unsigned {
    record_word,
    record_nonce,
    record_transfer,
    record_namespace,       // 2 words
    record_hash = 5,        // 4 words
    record_bytes_group = 9, // data bytes (32 bits), group (16), shard (16)
    record_world,           // world size (16), salt (48; zero in format 1)
    record_clock,
    record_data_checksum,
    record_checksum,
    record_tag,  // 2 words, zero in format 1; not covered by the checksum
};

enum State : unsigned { state_free, state_writing, state_ready };

inline constexpr std::uint64_t salt_mask = (std::uint64_t{1} << 48) - 1;
inline constexpr std::uint64_t generation_mask = (std::uint64_t{1} << 40) - 1;
constexpr std::uint64_t make_word(State state, std::uint64_t writer, std::uint64_t generation) {
    return state | writer << 8 | (generation & generation_mask) << 24;
}
constexpr unsigned state_of(std::uint64_t word) { return word & 0xff; }
constexpr std::uint16_t writer_of(std::uint64_t word) { return static_cast<std::uint16_t>(word >> 8); }
constexpr std::uint64_t generation_of(std::uint64_t word) { return word >> 24; }

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr std::uint64_t stride_of(std::uint64_t slot_bytes) { return round_up(slot_bytes, page_bytes); }
constexpr std::uint64_t data_offset_of(std::uint64_t count) { return page_bytes + round_up(count * record_bytes, page_bytes); }

// How many slots an extent holds; 0 if not even one fits. Larger slots than the extent give 0 at once: nothing overflows.
constexpr std::uint64_t slots_per_extent(std::uint64_t extent_bytes, std::uint64_t slot_bytes) {
    if (slot_bytes == 0 || slot_bytes > extent_bytes) return 0;
    const std::uint64_t stride = stride_of(slot_bytes);
    std::uint64_t count = (extent_bytes - page_bytes) / (stride + record_bytes);
    while (count > 0 && data_offset_of(count) + count * stride > extent_bytes) --count;
    return count;
}

}  // namespace kvtier::pool
