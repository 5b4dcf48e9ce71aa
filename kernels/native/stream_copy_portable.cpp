// For x86 without AVX2, this uses SSE2, which every 64-bit x86 has. For other processors it uses the C library's copy.
#include "stream_copy.hpp"

#if defined(__x86_64__)

#include "stream_copy_x86.hpp"

namespace kvtier {

namespace {

struct Line128 {
    __m128i parts[4];
    void load(const std::byte* from) {
        for (int i = 0; i < 4; ++i) parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    }
    void stream(std::byte* to) const {
        for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, parts[i]);
    }
};

}  // namespace

const StreamOps& stream_ops_portable() {
    static constexpr StreamOps ops{copy_pieces<Line128>, store_fence, "sse2"};
    return ops;
}

}  // namespace kvtier

#else

#include <atomic>
#include <cstring>

namespace kvtier {

namespace {

void copy_pieces(const Piece* pieces, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
}

void store_fence() { std::atomic_thread_fence(std::memory_order_release); }

}  // namespace

const StreamOps& stream_ops_portable() {
    static constexpr StreamOps ops{copy_pieces, store_fence, "memcpy"};
    return ops;
}

}  // namespace kvtier

#endif
