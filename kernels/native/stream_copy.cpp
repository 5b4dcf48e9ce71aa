#include "stream_copy.hpp"

#include <algorithm>
#include <cstring>

namespace kvtier {

namespace {

// How much of each piece is fetched when it is added.
constexpr std::size_t kFetchBytes = 256;

}  // namespace

const std::vector<const StreamOps*>& stream_variants() {
    static const std::vector<const StreamOps*> variants = [] {
        std::vector<const StreamOps*> found;
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f")) found.push_back(&stream_ops_avx512());
        if (__builtin_cpu_supports("avx2")) found.push_back(&stream_ops_avx2());
#endif
        found.push_back(&stream_ops_portable());
        return found;
    }();
    return variants;
}

void StreamCopier::add(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes < kStreamBytesMin) {
        std::memcpy(to, from, bytes);
        return;
    }
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kLineBytes;
    if (head != 0) std::memcpy(to, from, head);
    const std::size_t end = head + (bytes - head) / kLineBytes * kLineBytes;
    if (end != bytes) std::memcpy(to + end, from + end, bytes - end);
    for (std::size_t start = head; start < end; start += kPieceBytes) {
        const std::size_t piece = std::min(kPieceBytes, end - start);
        for (std::size_t i = 0; i < std::min(kFetchBytes, piece); i += kLineBytes) __builtin_prefetch(from + start + i);
        pieces_[count_++] = {to + start, from + start, piece};
        if (count_ == pieces_.size()) copy_first(kStreams);
    }
}

void StreamCopier::copy_first(std::size_t count) {
    ops_.copy(pieces_.data(), count);
    if (after_) after_(pieces_.data(), count);
    std::copy(pieces_.begin() + static_cast<std::ptrdiff_t>(count), pieces_.begin() + static_cast<std::ptrdiff_t>(count_),
              pieces_.begin());
    count_ -= count;
}

void StreamCopier::finish() {
    while (count_ != 0) copy_first(std::min(count_, kStreams));
    ops_.fence();
}

}  // namespace kvtier
