// What clients may know about a space's blocks without asking: a set of block hashes in memory that the daemon writes and
// clients map read-only. It is advisory: a hash that is missing may be there, and one that is found has to be looked up.
//
// A page of header is followed by buckets of eight words, one cache line each. A word is `tag << 8 | count`: the upper 56
// bits of the hash's keyed 64-bit hash, and how many blocks (of several tiers, or with the same tag) it stands for. A hash
// has two buckets, and goes into the one that is emptier when it comes, so hardly any bucket ever gets full. If both are
// full, the hash is left out.
//
// There are buckets for as many blocks as all tiers can have, which may be a thousand times as many as there are. So they come
// into use one by one, each with a part of the words of another one (linear hashing): else each new hash would touch two pages
// of memory that nothing has touched before. A word that moves is in both buckets until readers have been told of the new one.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "key_hash.hpp"

namespace kvtier {

constexpr std::uint64_t kIndexMagic = 0x3258444e4954564bu;  // "KVTINDX2"
constexpr std::size_t kIndexHeaderBytes = 4096;
constexpr std::size_t kBucketWords = 8;
// With only two words for each block, one of some thousand hashes in a full and busy pool found both of its buckets full, and
// was a miss as long as it was there.
constexpr std::uint64_t kWordsPerBlock = 4;
constexpr std::size_t kBucketBytes = kBucketWords * sizeof(std::uint64_t);
constexpr std::size_t kIndexBucketsMax = std::size_t{1} << 24;  // a gigabyte of words
constexpr std::size_t kBucketsAtFirst = 64;                         // a page of memory

enum IndexHeader : std::size_t { index_magic, index_boot_nonce, index_seed, index_buckets, index_complete, index_in_use };

// The words, and where a hash belongs among them.
class IndexWords {
   public:
    // Where a hash belongs, however many buckets are in use: the upper 56 bits of its word say it.
    struct Place {
        std::uint64_t tag;
    };
    struct Pair {
        std::size_t buckets[2];  // these may be the same
    };

    IndexWords(std::byte* memory, std::size_t buckets, std::uint64_t seed)
        : header_(reinterpret_cast<std::uint64_t*>(memory)),
          words_(reinterpret_cast<std::uint64_t*>(memory + kIndexHeaderBytes)),
          buckets_(buckets),
          key_hash_(seed) {}

    Place place(const std::uint8_t* hash) const { return {key_hash_.wide(0, hash) >> 8}; }
    // The two buckets of a place among those that are in use.
    static Pair pair(const Place& place, std::size_t in_use) {
        const std::size_t round = std::bit_floor(in_use);
        const auto bucket = [&](std::uint64_t bits) {
            const std::size_t i = bits & (2 * round - 1);
            return i < in_use ? i : i - round;  // that one has not been divided yet in this round
        };
        return {{bucket(place.tag), bucket(place.tag >> 28)}};
    }
    void prefetch(const Place& place) const {
        for (const std::size_t bucket : pair(place, in_use()).buckets) __builtin_prefetch(&words_[bucket * kBucketWords]);
    }
    // What a reader has seen before a word counts as seen before it: see IndexReader::has.
    std::uint64_t load(std::size_t word) const { return at(words_, word).load(std::memory_order_acquire); }
    void store(std::size_t word, std::uint64_t value) { at(words_, word).store(value, std::memory_order_release); }

    // Calls visit(index, word) for each word of the two buckets until it returns true. Returns whether it did.
    template <class Visit>
    bool any(const Pair& pair, Visit visit) const {
        for (const std::size_t bucket : pair.buckets)
            for (std::size_t i = bucket * kBucketWords; i < (bucket + 1) * kBucketWords; ++i)
                if (visit(i, load(i))) return true;
        return false;
    }

    // Within the memory, whatever the header says.
    std::size_t in_use() const { return std::clamp<std::uint64_t>(header(index_in_use), 1, buckets_); }
    std::uint64_t header(IndexHeader field) const { return at(header_, field).load(std::memory_order_acquire); }
    void set_header(IndexHeader field, std::uint64_t value) { at(header_, field).store(value, std::memory_order_release); }
    std::size_t buckets() const { return buckets_; }

   private:
    static std::atomic_ref<std::uint64_t> at(std::uint64_t* words, std::size_t i) {
        return std::atomic_ref<std::uint64_t>(words[i]);
    }

    std::uint64_t* header_;
    std::uint64_t* words_;
    std::size_t buckets_;  // in use or not
    KeyHash key_hash_;
};

// The daemon's side, which has one writer.
class IndexPage {
   public:
    using Place = IndexWords::Place;

    // Bytes of a page in which so many hashes fill at most a quarter of the words. Its memory is taken as hashes come.
    static std::size_t bytes_for(std::uint64_t blocks);

    // Takes memory of zeros. Throws unless it is a header and a power of two of buckets, and aligned to cache lines.
    IndexPage(std::byte* memory, std::size_t bytes, std::uint64_t boot_nonce, std::uint64_t seed);

    Place place(const std::uint8_t* hash) const { return words_.place(hash); }
    void prefetch(const Place& place) const { words_.prefetch(place); }
    void add(const Place& place);
    void remove(const Place& place);
    // From now on clients rely on it that a hash that is missing is not there.
    void complete() { words_.set_header(index_complete, 1); }
    // From now on they do not.
    void incomplete() { words_.set_header(index_complete, 0); }

    std::uint64_t left_out() const { return left_out_; }

   private:
    void add_bucket();

    IndexWords words_;
    std::size_t in_use_;      // buckets
    std::size_t filled_ = 0;  // words
    std::uint64_t left_out_ = 0;
};

// A client's side, for use in any thread.
class IndexReader {
   public:
    // Throws if the memory is not such a page.
    IndexReader(const std::byte* memory, std::size_t bytes);

    bool complete() const { return words_.header(index_complete) != 0; }
    std::uint64_t boot_nonce() const { return words_.header(index_boot_nonce); }
    IndexWords::Place place(const std::uint8_t* hash) const { return words_.place(hash); }
    void prefetch(const IndexWords::Place& place) const { words_.prefetch(place); }
    bool has(const IndexWords::Place& place) const;

   private:
    static constexpr int kTries = 16;

    IndexWords words_;  // only read
};

}  // namespace kvtier
