#include "checksum.hpp"

namespace kvtier {

const std::vector<const ChecksumOps*>& checksum_variants() {
    static const std::vector<const ChecksumOps*> variants = [] {
        std::vector<const ChecksumOps*> found;
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx512f")) found.push_back(&checksum_ops_avx512());
        if (__builtin_cpu_supports("avx2")) found.push_back(&checksum_ops_avx2());
#endif
        found.push_back(&checksum_ops_portable());
        return found;
    }();
    return variants;
}

}  // namespace kvtier
