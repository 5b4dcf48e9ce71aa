#include "index_page.hpp"

#include <algorithm>
#include <bit>

#include "refuse.hpp"

namespace kvtier {

namespace {

// A count that has reached this value never changes again, because how many blocks it stands for is not known any more.
constexpr std::uint64_t kCountMax = 0xff;

std::size_t checked_buckets(const std::byte* memory, std::size_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(memory) % kBucketBytes) refuse("memory is not aligned to ", kBucketBytes, " bytes");
    const std::size_t buckets = bytes < kIndexHeaderBytes ? 0 : (bytes - kIndexHeaderBytes) / kBucketBytes;
    if (!std::has_single_bit(buckets) || buckets > kIndexBucketsMax || bytes != kIndexHeaderBytes + buckets * kBucketBytes)
        refuse("memory has ", bytes, " bytes; expected a header of ", kIndexHeaderBytes, " and 1 to ", kIndexBucketsMax,
               " buckets of ", kBucketBytes, ", a power of two");
    return buckets;
}

}  // namespace

std::size_t IndexPage::bytes_for(std::uint64_t blocks) {
    const std::uint64_t wanted = std::min<std::uint64_t>(blocks, kIndexBucketsMax * kBucketWords) * kWordsPerBlock / kBucketWords;
    return kIndexHeaderBytes + std::min(std::bit_ceil(std::max<std::uint64_t>(wanted, 16)), kIndexBucketsMax) * kBucketBytes;
}

IndexPage::IndexPage(std::byte* memory, std::size_t bytes, std::uint64_t boot_nonce, std::uint64_t seed)
    : words_(memory, checked_buckets(memory, bytes), seed), in_use_(std::min(words_.buckets(), kBucketsAtFirst)) {
    words_.set_header(index_boot_nonce, boot_nonce);
    words_.set_header(index_seed, seed);
    words_.set_header(index_buckets, words_.buckets());
    words_.set_header(index_in_use, in_use_);
    words_.set_header(index_magic, kIndexMagic);
}

void IndexPage::add(const Place& place) {
    const auto count = [&](std::size_t i, std::uint64_t word) {
        if (word == 0 || word >> 8 != place.tag) return false;
        if ((word & 0xff) < kCountMax) words_.store(i, word + 1);
        return true;
    };
    const IndexWords::Pair pair = IndexWords::pair(place, in_use_);
    if (words_.any(pair, count)) return;
    std::size_t chosen = 0, room = 0;
    for (const std::size_t bucket : pair.buckets) {
        std::size_t empty = 0, first = 0;
        for (std::size_t i = (bucket + 1) * kBucketWords; i-- > bucket * kBucketWords;)
            if (words_.load(i) == 0) {
                ++empty;
                first = i;
            }
        if (empty > room) {
            room = empty;
            chosen = first;
        }
    }
    if (room == 0) {
        ++left_out_;
        return;
    }
    words_.store(chosen, place.tag << 8 | 1);
    ++filled_;
    if (filled_ * kWordsPerBlock > in_use_ * kBucketWords && in_use_ < words_.buckets()) add_bucket();
}

// The words that belong to the new bucket from now on are copied, then readers are told of it, then the originals go. A reader
// who finds neither has seen that an original is gone, and so will see that there is a new bucket.
void IndexPage::add_bucket() {
    const std::size_t divided = in_use_ - std::bit_floor(in_use_), added = in_use_;
    std::size_t moved[kBucketWords], count = 0;
    for (std::size_t i = divided * kBucketWords; i < (divided + 1) * kBucketWords; ++i) {
        const std::uint64_t word = words_.load(i);
        if (word == 0) continue;
        const IndexWords::Pair pair = IndexWords::pair({word >> 8}, in_use_ + 1);
        if (pair.buckets[0] == divided || pair.buckets[1] == divided) continue;
        words_.store(added * kBucketWords + count, word);
        moved[count++] = i;
    }
    words_.set_header(index_in_use, ++in_use_);
    while (count != 0) words_.store(moved[--count], 0);
}

void IndexPage::remove(const Place& place) {
    words_.any(IndexWords::pair(place, in_use_), [&](std::size_t i, std::uint64_t word) {
        if (word == 0 || word >> 8 != place.tag) return false;
        const std::uint64_t count = word & 0xff;
        if (count == 1) --filled_;
        if (count < kCountMax) words_.store(i, count == 1 ? 0 : word - 1);
        return true;
    });
}

IndexReader::IndexReader(const std::byte* memory, std::size_t bytes)
    : words_(const_cast<std::byte*>(memory), checked_buckets(memory, bytes),
             bytes < kIndexHeaderBytes ? 0 : reinterpret_cast<const std::uint64_t*>(memory)[index_seed]) {
    if (words_.header(index_magic) != kIndexMagic) refuse("memory is no index page");
    if (words_.header(index_buckets) != words_.buckets())
        refuse("the page says ", words_.header(index_buckets), " buckets; memory has ", words_.buckets());
}

// A hash that is not found may have moved meanwhile, so it is looked for again if there are more buckets now. One that is
// never found while more and more come counts as there, because nothing is known of it.
bool IndexReader::has(const IndexWords::Place& place) const {
    const auto is_it = [&](std::size_t, std::uint64_t word) { return word >> 8 == place.tag && (word & 0xff) != 0; };
    for (int tries = 0; tries < kTries; ++tries) {
        const std::size_t in_use = words_.in_use();
        if (words_.any(IndexWords::pair(place, in_use), is_it)) return true;
        if (words_.in_use() == in_use) return false;
    }
    return true;
}

}  // namespace kvtier
