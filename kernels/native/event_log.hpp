// What engines look up and store, until somebody takes it: events in columns, and eight bytes for each block hash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "key_hash.hpp"

namespace kvtier {

// It has one writer, and never more than the bytes that it was made for.
class EventLog {
   public:
    struct Event {
        std::uint64_t kind, time_us, place, count, hits, part;
    };
    using Secret = std::array<std::uint64_t, kHashBytes / sizeof(std::uint64_t)>;

    // The words of `secret` are made odd, so that none of a hash's bits gets lost.
    EventLog(std::size_t bytes_max, const Secret& secret) : bytes_max_(bytes_max), secret_(secret) {
        for (std::uint64_t& word : secret_) word |= 1;
    }

    static std::size_t bytes_of(std::size_t hashes) { return sizeof(Event) + hashes * sizeof(std::uint64_t); }

    // Adds an event of the hashes of `head` and `tail`, one after the other. False if it found no room; then nothing has
    // changed.
    bool add(Event event, std::span<const std::uint8_t> head, std::span<const std::uint8_t> tail) {
        event.count = (head.size() + tail.size()) / kHashBytes;
        if (bytes_of(event.count) > bytes_max_ - bytes()) return false;
        events_.push_back(event);
        mix(head);
        mix(tail);
        return true;
    }

    std::size_t bytes() const { return events_.size() * sizeof(Event) + mixed_.size() * sizeof(std::uint64_t); }

    // The first events, and what was mixed of their hashes: as many as have `bytes_max` bytes together, but one at least.
    struct First {
        std::span<const Event> events;
        std::span<const std::uint64_t> mixed;
    };
    First first(std::size_t bytes_max) const {
        std::size_t events = 0, hashes = 0, bytes = 0;
        while (events < events_.size()) {
            bytes += bytes_of(events_[events].count);
            if (events > 0 && bytes > bytes_max) break;
            hashes += events_[events++].count;
        }
        return {std::span(events_).first(events), std::span(mixed_).first(hashes)};
    }

    // Forgets what `first` has returned. The memory is kept for what follows.
    void remove(const First& first) {
        mixed_.erase(mixed_.begin(), mixed_.begin() + static_cast<std::ptrdiff_t>(first.mixed.size()));
        events_.erase(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(first.events.size()));
    }

   private:
    void mix(std::span<const std::uint8_t> hashes) {
        for (std::size_t at = 0; at < hashes.size(); at += kHashBytes) {
            Secret words;
            std::memcpy(words.data(), hashes.data() + at, kHashBytes);
            std::uint64_t sum = 0;
            for (std::size_t i = 0; i < words.size(); ++i) sum += (words[i] ^ words[i] >> 32) * secret_[i];
            mixed_.push_back(sum);
        }
    }

    std::size_t bytes_max_;
    Secret secret_;
    std::vector<Event> events_;
    std::vector<std::uint64_t> mixed_;
};

}  // namespace kvtier
