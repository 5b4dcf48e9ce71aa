#include "stream_copy_x86.hpp"

namespace kvtier {

namespace {

struct Line256 {
    __m256i low, high;
    void load(const std::byte* from) {
        low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
    }
    void stream(std::byte* to) const {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, high);
    }
};

}  // namespace

const StreamOps& stream_ops_avx2() {
    static constexpr StreamOps ops{copy_pieces<Line256>, store_fence, "avx2"};
    return ops;
}

}  // namespace kvtier
