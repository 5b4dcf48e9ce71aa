// The index's own hash of a block key. Block hashes come from clients and may be anything, even chosen to collide, so this
// hash is keyed with a secret of the table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvtier {

constexpr std::size_t kHashBytes = 32;

class KeyHash {
   public:
    explicit KeyHash(std::uint64_t seed) {
        for (std::uint64_t& secret : secrets_) {  // splitmix64
            seed += 0x9e3779b97f4a7c15u;
            std::uint64_t z = seed;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
            z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
            secret = z ^ (z >> 31);
        }
    }

    // 32 well-mixed bits of the key (space, hash).
    std::uint32_t operator()(std::uint32_t space, const std::uint8_t* hash) const {
        return static_cast<std::uint32_t>(wide(space, hash) >> 32);
    }

    // 64 well-mixed bits of it.
    std::uint64_t wide(std::uint32_t space, const std::uint8_t* hash) const {
        std::uint64_t words[4];
        std::memcpy(words, hash, kHashBytes);
        const std::uint64_t low = fold(words[0] ^ secrets_[0], words[1] ^ secrets_[1]);
        const std::uint64_t high = fold(words[2] ^ secrets_[2], words[3] ^ secrets_[3]);
        return fold(low ^ secrets_[4] ^ space, high ^ secrets_[5]);
    }

   private:
    __extension__ using Wide = unsigned __int128;

    static std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
        const Wide product = static_cast<Wide>(a) * b;
        return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    }

    std::array<std::uint64_t, 6> secrets_;
};

}  // namespace kvtier
