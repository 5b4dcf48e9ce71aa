// Copies of many fragments past the cache, several at a time.
//
// A fragment of a few KiB is too short for the processor to get up to speed before the next one begins somewhere else. So
// eight pieces of at most a page are copied in lockstep, with non-temporal stores: eight streams keep the memory busy
// while each of them is still starting. Speed relative to one large memcpy (Xeon with AVX-512, 64 planes x 64 random blocks,
// gather / scatter): one stream 0.81 / 1.04 at 4 KiB and 0.87 / 0.86 at 64 KiB; eight 1.44 / 1.42 and 1.01 / 1.03.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace kvtier {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kPieceBytes = 4096;
constexpr std::size_t kStreams = 8;

// Whole cache lines: `to` is aligned to one, `bytes` is a multiple of one.
struct Piece {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
};

// One variant, compiled for one instruction set. `copy` takes up to kStreams pieces; `fence` orders all non-temporal stores
// before whatever is stored next.
struct StreamOps {
    void (*copy)(const Piece* pieces, std::size_t count);
    void (*fence)();
    const char* name;
};

const StreamOps& stream_ops_portable();
#if defined(__x86_64__)
const StreamOps& stream_ops_avx2();
const StreamOps& stream_ops_avx512();
#endif

// The variants that this processor can run, fastest first.
const std::vector<const StreamOps*>& stream_variants();

// Fragments shorter than this are copied the usual way, because they are too short to make up for their unaligned ends.
constexpr std::size_t kStreamBytesMin = 512;

// Collects fragments and copies them in groups. One group waits while the next is collected, so that the addresses of its
// pieces are translated and their first lines are there when it is copied. Nothing need be copied before finish().
class StreamCopier {
   public:
    // `after`, if not empty, gets each group's pieces right after they are copied, while their sources are in the cache.
    using After = std::function<void(const Piece* pieces, std::size_t count)>;

    explicit StreamCopier(const StreamOps& ops, After after = {}) : ops_(ops), after_(std::move(after)) {}
    StreamCopier(const StreamCopier&) = delete;
    StreamCopier& operator=(const StreamCopier&) = delete;

    // The two must not overlap, and the target must not overlap any other fragment added before finish().
    void add(std::byte* to, const std::byte* from, std::size_t bytes);
    // Copies what is left. All of its stores are ordered before any store that follows.
    void finish();

   private:
    void copy_first(std::size_t count);

    const StreamOps& ops_;
    After after_;
    std::array<Piece, 2 * kStreams> pieces_;
    std::size_t count_ = 0;
};

}  // namespace kvtier
