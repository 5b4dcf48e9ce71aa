// Included by each checksum_*.cpp, which is compiled for its own instruction set, so everything here is local to that file.
#pragma once

#define XXH_INLINE_ALL
#include "checksum.hpp"
#include "xxhash.h"

namespace kvtier {
namespace {

static_assert(sizeof(XXH3_state_t) == 576 && alignof(XXH3_state_t) <= 64);

std::uint64_t variant_hash(const void* data, std::size_t bytes) { return XXH3_64bits(data, bytes); }
void variant_reset(void* state) {
    XXH3_INITSTATE(static_cast<XXH3_state_t*>(state));
    XXH3_64bits_reset(static_cast<XXH3_state_t*>(state));
}
void variant_update(void* state, const void* data, std::size_t bytes) {
    XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, bytes);
}
std::uint64_t variant_digest(const void* state) { return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state)); }

}  // namespace
}  // namespace kvtier

#define KVTIER_CHECKSUM_VARIANT(variant)                                                                             \
    namespace kvtier {                                                                                               \
    const ChecksumOps& checksum_ops_##variant() {                                                                    \
        static constexpr ChecksumOps ops{variant_hash, variant_reset, variant_update, variant_digest, #variant};     \
        return ops;                                                                                                  \
    }                                                                                                                \
    }
