#include "checksum.hpp"

namespace kvtier {

const ChecksumOps& checksum_ops() {
    static const ChecksumOps& chosen = []() -> const ChecksumOps& {
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f")) return checksum_ops_avx512();
        if (__builtin_cpu_supports("avx2")) return checksum_ops_avx2();
#endif
        return checksum_ops_portable();
    }();
    return chosen;
}

}  // namespace kvtier
