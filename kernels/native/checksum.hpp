// xxh3_64 of the vendored xxHash, with the widest vectors that this processor has. Every variant computes the same number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier {

// One variant: the same functions compiled for one instruction set.
struct ChecksumOps {
    std::uint64_t (*hash)(const void* data, std::size_t bytes);
    void (*reset)(void* state);
    void (*update)(void* state, const void* data, std::size_t bytes);
    std::uint64_t (*digest)(const void* state);
    const char* name;
};

const ChecksumOps& checksum_ops_portable();
#if defined(__x86_64__)
const ChecksumOps& checksum_ops_avx2();
const ChecksumOps& checksum_ops_avx512();
#endif

// The variants that this processor can run, fastest first.
const std::vector<const ChecksumOps*>& checksum_variants();
inline const ChecksumOps& checksum_ops() { return *checksum_variants().front(); }

inline std::uint64_t xxh3_64(const void* data, std::size_t bytes) { return checksum_ops().hash(data, bytes); }

// xxh3_64 of a sequence of pieces, as if they were one.
class Checksum {
   public:
    Checksum() : ops_(checksum_ops()) { ops_.reset(state_); }
    void reset() { ops_.reset(state_); }
    void update(const void* data, std::size_t bytes) { ops_.update(state_, data, bytes); }
    std::uint64_t digest() const { return ops_.digest(state_); }

   private:
    static constexpr std::size_t kStateBytes = 576;  // XXH3_state_t; checked in checksum_variant.hpp
    const ChecksumOps& ops_;
    alignas(64) unsigned char state_[kStateBytes];
};

}  // namespace kvtier
