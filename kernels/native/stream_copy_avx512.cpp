#include "stream_copy_x86.hpp"

namespace kvtier {

namespace {

struct Line512 {
    __m512i value;
    void load(const std::byte* from) { value = _mm512_loadu_si512(from); }
    void stream(std::byte* to) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value); }
};

}  // namespace

const StreamOps& stream_ops_avx512() {
    static constexpr StreamOps ops{copy_pieces<Line512>, store_fence, "avx512"};
    return ops;
}

}  // namespace kvtier
