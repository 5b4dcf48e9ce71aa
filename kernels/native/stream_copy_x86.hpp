// Included by stream_copy_avx*.cpp (and, for SSE2, stream_copy_portable.cpp), each compiled for its own instruction set. So
// everything here is local to that file, and uses none of the standard library's inline functions.
#pragma once

#include <immintrin.h>

#include "stream_copy.hpp"

namespace kvtier {
namespace {

// Cache lines that each stream copies in a turn.
constexpr std::size_t kTurnLines = 4;
constexpr std::size_t kTurnBytes = kTurnLines * kLineBytes;
// How far ahead each stream fetches.
constexpr std::size_t kAheadBytes = 512;

// Copies [start, end) of `Streams` pieces in turns. Line is a vector type with load() and stream() of one cache line.
template <class Line, std::size_t Streams>
inline void copy_turns(const Piece* pieces, std::size_t end) {
    for (std::size_t i = 0; i < end; i += kTurnBytes)
        for (std::size_t s = 0; s < Streams; ++s) {
            const std::byte* const from = pieces[s].from + i;
            if (i + kAheadBytes < end)
                for (std::size_t line = 0; line < kTurnLines; ++line)
                    __builtin_prefetch(from + kAheadBytes + line * kLineBytes);
            Line lines[kTurnLines];
            for (std::size_t line = 0; line < kTurnLines; ++line) lines[line].load(from + line * kLineBytes);
            for (std::size_t line = 0; line < kTurnLines; ++line) lines[line].stream(pieces[s].to + i + line * kLineBytes);
        }
}

template <class Line, std::size_t Streams>
inline void copy_group(const Piece* pieces) {
    std::size_t common = pieces[0].bytes;
    for (std::size_t s = 1; s < Streams; ++s)
        if (pieces[s].bytes < common) common = pieces[s].bytes;
    common -= common % kTurnBytes;
    copy_turns<Line, Streams>(pieces, common);
    for (std::size_t s = 0; s < Streams; ++s)
        for (std::size_t i = common; i < pieces[s].bytes; i += kLineBytes) {
            Line line;
            line.load(pieces[s].from + i);
            line.stream(pieces[s].to + i);
        }
}

template <class Line>
void copy_pieces(const Piece* pieces, std::size_t count) {
    static_assert(kStreams == 8);
    if (count == 8) return copy_group<Line, 8>(pieces);
    if (count >= 4) {
        copy_group<Line, 4>(pieces);
        pieces += 4;
        count -= 4;
    }
    if (count >= 2) {
        copy_group<Line, 2>(pieces);
        pieces += 2;
        count -= 2;
    }
    if (count == 1) copy_group<Line, 1>(pieces);
}

void store_fence() { _mm_sfence(); }

}  // namespace
}  // namespace kvtier
