// Shared memory of a client: sealed memfds, and the page of words (docs/protocol.md, sections 4 and 8).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvtier_example {

// A file descriptor, closed with its owner.
class Fd {
   public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd();
    int get() const { return fd_; }

   private:
    int fd_ = -1;
};

// Zeroed memory in a memfd that can neither shrink nor grow, mapped as long as this object lives.
class SharedMemory {
   public:
    // Allocates all of it. Throws std::system_error.
    SharedMemory(const std::string& name, std::size_t bytes);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    int fd() const { return fd_.get(); }

   private:
    Fd fd_;
    std::size_t bytes_;
    std::byte* data_ = nullptr;
};

enum class PartState : std::uint8_t {
    armed = 0,
    started = 1,
    revoked = 2,
    done = 3,
    failed = 4,
    lost = 5,  // it never started and never will, or nobody can tell any more how it ended
};

// Whether nothing of the part can read or write our memory any more.
constexpr bool is_over(PartState state) { return state != PartState::armed && state != PartState::started; }

// One registered page: first the doorbell words, then the part words. A page serves one registration. It is used by one
// thread at a time, while the copy worker uses the words.
class WordsPage {
   public:
    WordsPage(std::size_t doorbells, std::size_t parts)
        : memory_("kvtier-words", (doorbells + parts) * 8), doorbells_(doorbells), parts_(parts), final_(parts) {}

    int fd() const { return memory_.fd(); }
    // Takes the pidfd that came with WordsRegistered.
    void adopt_worker(Fd pidfd) { worker_ = std::move(pidfd); }
    bool worker_is_dead() const;

    // Raises a doorbell, unless it has reached the value already.
    void ring(std::size_t doorbell, std::uint64_t value);

    PartState state(std::size_t part, std::uint64_t ticket);
    // Moves the part from armed, and with `started` (for stores only) also from STARTED, to REVOKED. Returns its state.
    PartState revoke(std::size_t part, std::uint64_t ticket, bool started);
    // From now on nothing starts here. Call it again until `fenced`: words of parts that ran are sealed as they end.
    void seal();
    // Whether no part runs here. On a sealed page none ever will.
    bool fenced();

   private:
    std::atomic_ref<std::uint64_t> word(std::size_t index) const {
        return std::atomic_ref<std::uint64_t>(reinterpret_cast<std::uint64_t*>(memory_.data())[index]);
    }
    std::atomic_ref<std::uint64_t> part_word(std::size_t part) const { return word(doorbells_ + part); }
    PartState read(std::size_t part, std::uint64_t ticket) const;

    SharedMemory memory_;
    std::size_t doorbells_, parts_;
    Fd worker_;
    bool sealed_ = false;
    std::vector<std::uint64_t> final_;  // what a sealed word said before
};

}  // namespace kvtier_example
