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
    : words_(memory, checked_buckets(memory, bytes), seed) {
    words_.set_header(index_boot_nonce, boot_nonce);
    words_.set_header(index_seed, seed);
    words_.set_header(index_buckets, words_.buckets());
    words_.set_header(index_magic, kIndexMagic);
}

void IndexPage::add(const Place& place) {
    const auto count = [&](std::size_t i, std::uint64_t word) {
        if (word == 0 || word >> 8 != place.tag) return false;
        if ((word & 0xff) < kCountMax) words_.store(i, word + 1);
        return true;
    };
    if (words_.any(place, count)) return;
    std::size_t chosen = 0, room = 0;
    for (const std::size_t bucket : place.buckets) {
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
    if (room == 0)
        ++left_out_;
    else
        words_.store(chosen, place.tag << 8 | 1);
}

void IndexPage::remove(const Place& place) {
    words_.any(place, [&](std::size_t i, std::uint64_t word) {
        if (word == 0 || word >> 8 != place.tag) return false;
        const std::uint64_t count = word & 0xff;
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

}  // namespace kvtier
