#include "shared.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <system_error>

namespace kvtier_example {

namespace {

constexpr std::uint64_t kTicketMax = (std::uint64_t{1} << 56) - 1;
constexpr std::uint64_t kStarted = 1, kRevoked = 2, kFailed = 4;
constexpr std::uint64_t kSealed = kTicketMax << 8 | kRevoked;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Fd::~Fd() {
    if (fd_ >= 0) close(fd_);
}

SharedMemory::SharedMemory(const std::string& name, std::size_t bytes)
    : fd_(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING)), bytes_(bytes) {
    if (fd_.get() < 0) fail("memfd_create");
    if (ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) fail("ftruncate");
    if (fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) fail("F_ADD_SEALS");
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (mapped == MAP_FAILED) fail("mmap");
    // The daemon takes no memory for others, and refuses what is not allocated.
    if (madvise(mapped, bytes, MADV_POPULATE_WRITE) != 0) {
        munmap(mapped, bytes);
        fail("MADV_POPULATE_WRITE: there is no memory for what is to be shared");
    }
    data_ = static_cast<std::byte*>(mapped);
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

bool WordsPage::worker_is_dead() const {
    pollfd worker{worker_.get(), POLLIN, 0};
    return worker.fd >= 0 && poll(&worker, 1, 0) > 0;
}

void WordsPage::ring(std::size_t doorbell, std::uint64_t value) {
    auto bell = word(doorbell);
    std::uint64_t seen = bell.load(std::memory_order_relaxed);
    while (seen < value &&
           !bell.compare_exchange_weak(seen, value, std::memory_order_release, std::memory_order_relaxed)) {
    }
}

PartState WordsPage::state(std::size_t part, std::uint64_t ticket) {
    PartState found = read(part, ticket);
    if (found == PartState::started && worker_is_dead()) {
        found = read(part, ticket);  // the worker may have ended it just before it died
        if (found == PartState::started) return PartState::failed;
    }
    if (found == PartState::armed && sealed_ && worker_is_dead()) return PartState::lost;
    return found;
}

PartState WordsPage::read(std::size_t part, std::uint64_t ticket) const {
    std::uint64_t value = part_word(part).load(std::memory_order_acquire);
    const bool is_sealed = value == kSealed;
    if (is_sealed) value = final_[part];
    if (value >> 8 < ticket) return is_sealed ? PartState::lost : PartState::armed;
    if (value >> 8 > ticket) return PartState::lost;
    const std::uint64_t state = value & 0xff;
    // No worker writes another state, so assume that the copy goes on.
    return state < kStarted || state > kFailed ? PartState::started : static_cast<PartState>(state);
}

PartState WordsPage::revoke(std::size_t part, std::uint64_t ticket, bool started) {
    auto word = part_word(part);
    const std::uint64_t revoked = ticket << 8 | kRevoked;
    std::uint64_t seen = word.load(std::memory_order_acquire);
    while (seen >> 8 < ticket || (started && seen == (ticket << 8 | kStarted)))
        if (word.compare_exchange_weak(seen, revoked, std::memory_order_acq_rel, std::memory_order_acquire)) break;
    return state(part, ticket);
}

void WordsPage::seal() {
    sealed_ = true;
    for (std::size_t part = 0; part < parts_; ++part) {
        auto word = part_word(part);
        std::uint64_t seen = word.load(std::memory_order_acquire);
        while (seen != kSealed && (seen & 0xff) != kStarted) {
            final_[part] = seen;
            if (word.compare_exchange_weak(seen, kSealed, std::memory_order_acq_rel, std::memory_order_acquire)) break;
        }
    }
}

bool WordsPage::fenced() {
    if (worker_is_dead()) return true;
    if (sealed_) seal();
    for (std::size_t part = 0; part < parts_; ++part)
        if ((part_word(part).load(std::memory_order_acquire) & 0xff) == kStarted) return false;
    return true;
}

}  // namespace kvtier_example
