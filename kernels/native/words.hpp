// 64-bit words in memory shared between processes: plain values, doorbells, and the states of parts.
//
// A part word is `ticket << 8 | state`. A part with ticket T is armed as long as the word's ticket is smaller than T, so
// nobody writes "armed" and neither side can overwrite the other's decision. Another process may have written anything into
// a word, so every function is defined for every value.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "refuse.hpp"

namespace kvtier {

enum PartState : std::uint64_t {
    kPartArmed = 0,
    kPartStarted = 1,
    kPartRevoked = 2,
    kPartDone = 3,
    kPartFailed = 4,
    kPartSuperseded = 5,
};

constexpr std::uint64_t kTicketMax = (std::uint64_t{1} << 56) - 1;

class Words {
   public:
    // The memory must outlive this object. Throws if it is too small for `count` words or not aligned to 8 bytes.
    Words(void* memory, std::size_t bytes, std::size_t count) : words_(static_cast<std::uint64_t*>(memory)), count_(count) {
        if (count == 0) refuse("count is 0; at least one word is needed");
        if (count > bytes / sizeof(std::uint64_t))
            refuse("count is ", count, ", but the buffer has room for ", bytes / sizeof(std::uint64_t), " words");
        if (reinterpret_cast<std::uintptr_t>(memory) % sizeof(std::uint64_t) != 0)
            refuse("buffer is not aligned to 8 bytes");
    }

    std::size_t count() const { return count_; }

    std::uint64_t load(std::size_t i) const { return at(i).load(std::memory_order_acquire); }
    void store(std::size_t i, std::uint64_t value) { at(i).store(value, std::memory_order_release); }
    bool compare_exchange(std::size_t i, std::uint64_t expected, std::uint64_t desired) {
        return at(i).compare_exchange_strong(expected, desired, std::memory_order_acq_rel, std::memory_order_acquire);
    }

    // Raises a doorbell to `value`. One that is already as high or higher stays as it is.
    void ring(std::size_t i, std::uint64_t value) {
        const Word word = at(i);
        std::uint64_t seen = word.load(std::memory_order_relaxed);
        while (seen < value &&
               !word.compare_exchange_weak(seen, value, std::memory_order_release, std::memory_order_relaxed)) {
        }
    }

    // Armed -> STARTED. False if the part was started, revoked or superseded before.
    bool try_start(std::size_t i, std::uint64_t ticket) { return decide(i, ticket, kPartStarted); }

    // Armed -> REVOKED. True as well if this very part is revoked already.
    bool try_revoke(std::size_t i, std::uint64_t ticket) {
        return decide(i, ticket, kPartRevoked) || load(i) == (ticket << 8 | kPartRevoked);
    }

    // STARTED -> DONE or FAILED. Everything that the caller wrote before is visible to whoever reads the new state.
    void finish(std::size_t i, std::uint64_t ticket, std::uint64_t state) {
        check_ticket(ticket);
        if (state != kPartDone && state != kPartFailed)
            refuse("state is ", state, "; expected ", kPartDone, " (DONE) or ", kPartFailed, " (FAILED)");
        std::uint64_t expected = ticket << 8 | kPartStarted;
        if (!at(i).compare_exchange_strong(expected, ticket << 8 | state, std::memory_order_acq_rel,
                                           std::memory_order_acquire))
            throw std::runtime_error(text("word ", i, " does not say STARTED for ticket ", ticket, ": it holds ticket ",
                                          expected >> 8, " in state ", expected & 0xff));
    }

    std::uint64_t part_state(std::size_t i, std::uint64_t ticket) const {
        check_ticket(ticket);
        const std::uint64_t word = load(i);
        if (word >> 8 < ticket) return kPartArmed;
        if (word >> 8 > ticket) return kPartSuperseded;
        const std::uint64_t state = word & 0xff;
        if (state < kPartStarted || state > kPartFailed)
            throw std::runtime_error(text("word ", i, " holds the unknown state ", state, " for ticket ", ticket));
        return state;
    }

   private:
    using Word = std::atomic_ref<std::uint64_t>;
    static_assert(Word::is_always_lock_free, "a lock would not be shared with the other process");

    Word at(std::size_t i) const {
        if (i >= count_) refuse("index is ", i, "; there are ", count_, " words");
        return Word(words_[i]);
    }
    static void check_ticket(std::uint64_t ticket) {
        if (ticket == 0 || ticket > kTicketMax) refuse("ticket is ", ticket, "; expected 1 to 2^56 - 1");
    }
    bool decide(std::size_t i, std::uint64_t ticket, PartState state) {
        check_ticket(ticket);
        const Word word = at(i);
        std::uint64_t seen = word.load(std::memory_order_acquire);
        while (seen >> 8 < ticket)
            if (word.compare_exchange_weak(seen, ticket << 8 | state, std::memory_order_acq_rel,
                                           std::memory_order_acquire))
                return true;
        return false;
    }

    std::uint64_t* words_;
    std::size_t count_;
};

}  // namespace kvtier
