#include "slab_io.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <numeric>
#include <system_error>

#include "checksum.hpp"
#include "refuse.hpp"

namespace kvtier::slab {

namespace {

// How often an operation is submitted again that was interrupted, or for which the kernel had no room.
constexpr unsigned kAttemptsMax = 4;
// Pauses of a millisecond in one call, while the kernel has no room and nothing is in flight that could make some.
constexpr unsigned kPausesMax = 1000;
// Completions that are taken at once.
constexpr unsigned kEventsMax = 256;

constexpr std::uint64_t kFileBytesMax = std::numeric_limits<std::int64_t>::max();

std::uint64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

void pause_ms() {
    const timespec time{0, 1'000'000};
    nanosleep(&time, nullptr);
}

void check_pages(const char* name, std::size_t row, std::uint64_t value) {
    if (value % page_bytes) refuse(name, "[", row, "] is ", value, "; expected a multiple of ", page_bytes);
}

void check_rows(const Request& request) {
    if (reinterpret_cast<std::uintptr_t>(request.memory) % page_bytes)
        refuse("memory does not begin at a page: its address is no multiple of ", page_bytes);
    for (std::size_t i = 0; i < request.lengths.size(); ++i) {
        const std::uint64_t memory = request.memory_offsets[i], file = request.file_offsets[i], bytes = request.lengths[i];
        check_pages("memory_offsets", i, memory);
        check_pages("file_offsets", i, file);
        check_pages("lengths", i, bytes);
        if (bytes == 0) refuse("lengths[", i, "] is 0; expected a page or more");
        if (memory > request.memory_bytes || bytes > request.memory_bytes - memory)
            refuse("memory_offsets[", i, "] is ", memory, " and lengths[", i, "] is ", bytes, ", but memory has ",
                   request.memory_bytes, " bytes");
        if (request.sums != nullptr && request.data_bytes[i] > bytes)
            refuse("data_bytes[", i, "] is ", request.data_bytes[i], ", but lengths[", i, "] is ", bytes);
        if (file > kFileBytesMax || bytes > kFileBytesMax - file)
            refuse("file_offsets[", i, "] is ", file, " and lengths[", i, "] is ", bytes, "; expected an end below 2^63");
    }
}

// The rows in the order of their offsets.
std::vector<std::size_t> in_order(std::span<const std::uint64_t> offsets) {
    std::vector<std::size_t> order(offsets.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (!std::is_sorted(offsets.begin(), offsets.end()))
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return offsets[a] < offsets[b]; });
    return order;
}

// If two rows were written to one place, it would be left to chance which of them stays there.
void check_disjoint(const char* name, std::span<const std::uint64_t> offsets, std::span<const std::uint64_t> lengths,
                    const std::vector<std::size_t>& order) {
    for (std::size_t k = 1; k < order.size(); ++k) {
        const std::size_t before = order[k - 1], row = order[k];
        if (offsets[row] - offsets[before] < lengths[before])
            refuse(name, "[", row, "] is ", offsets[row], ", inside what row ", before, " covers: ", lengths[before], " bytes from ",
                   offsets[before]);
    }
}

}  // namespace

SlabIo::SlabIo(int fd, unsigned depth, Progress progress) : depth_(depth), progress_(progress) {
    if (depth == 0 || depth > depth_max) refuse("depth is ", depth, "; expected 1 to ", depth_max);
    if (progress.words != nullptr && progress.index >= progress.words->count())
        refuse("progress_index is ", progress.index, "; there are ", progress.words->count(), " words");
    events_.resize(std::min(depth, kEventsMax));
    // With a duplicate, this object keeps its file, whatever the caller's number means later.
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), text("descriptor ", fd));
    if (syscall(SYS_io_setup, depth, &context_) != 0) {
        const int code = errno;
        ::close(fd_);
        throw std::system_error(
            code, std::generic_category(),
            code == EAGAIN ? text("no room for ", depth, " asynchronous operations: fs.aio-max-nr (see fs.aio-nr) is used up on this "
                                  "machine; raise it or lower the queue depth")
                           : text("io_setup for ", depth, " operations"));
    }
}

void SlabIo::close() {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
    if (fd_ >= 0) ::close(fd_);
    context_ = 0;
    fd_ = -1;
}

void SlabIo::transfer(Direction direction, const Request& request, std::int32_t* errors) {
    if (context_ == 0) refuse("this SlabIo is closed");
    check_rows(request);
    cut_into_pieces(direction, request);
    merge_pieces();
    std::fill_n(errors, request.lengths.size(), 0);
    if (request.sums != nullptr) std::fill_n(request.sums, request.lengths.size(), 0);
    patience_ = kPausesMax;
    while (!operations_.empty()) {
        prepare(direction);
        run(request, errors);
        // Operations that did not succeed as a whole are repeated piece by piece.
        operations_.clear();
        for (const Operation& again : again_) add_operation(again.first_piece, again.pieces, again.attempt);
        again_.clear();
    }
    while (!landed_.empty()) sum_one(request);
}

void SlabIo::cut_into_pieces(Direction direction, const Request& request) {
    const std::vector<std::size_t> order = in_order(request.file_offsets);
    if (direction == Direction::write)
        check_disjoint("file_offsets", request.file_offsets, request.lengths, order);
    else
        check_disjoint("memory_offsets", request.memory_offsets, request.lengths, in_order(request.memory_offsets));
    pieces_.clear();
    landed_.clear();
    pieces_left_.assign(request.sums != nullptr ? order.size() : 0, 0);
    landed_.reserve(pieces_left_.size());
    for (const std::size_t row : order) {
        const std::uint64_t length = request.lengths[row];
        if (request.sums != nullptr) pieces_left_[row] = (length + operation_bytes_max - 1) / operation_bytes_max;
        for (std::uint64_t done = 0; done < length; done += operation_bytes_max)
            pieces_.push_back({request.file_offsets[row] + done, std::min(operation_bytes_max, length - done),
                               request.memory + request.memory_offsets[row] + done, row});
    }
    // There is at most one operation, iovec and second attempt for each piece.
    for (auto* operations : {&operations_, &again_}) {
        operations->clear();
        operations->reserve(pieces_.size());
    }
    vectors_.reserve(pieces_.size());
    blocks_.reserve(pieces_.size());
    block_pointers_.reserve(pieces_.size());
}

void SlabIo::merge_pieces() {
    for (std::size_t first = 0; first < pieces_.size();) {
        std::uint64_t bytes = pieces_[first].bytes;
        std::size_t end = first + 1;
        while (end < pieces_.size() && pieces_[end].file_offset == pieces_[first].file_offset + bytes &&
               bytes + pieces_[end].bytes <= operation_bytes_max)
            bytes += pieces_[end++].bytes;
        add_operation(first, end - first, 1);
        first = end;
    }
}

void SlabIo::add_operation(std::size_t first_piece, std::size_t pieces, unsigned attempt) {
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < pieces; ++i) bytes += pieces_[first_piece + i].bytes;
    operations_.push_back({first_piece, pieces, bytes, attempt, false});
}

void SlabIo::prepare(Direction direction) {
    vectors_.clear();
    blocks_.clear();
    block_pointers_.clear();
    for (const Operation& operation : operations_) {
        const std::size_t first = vectors_.size();
        for (std::size_t i = operation.first_piece; i < operation.first_piece + operation.pieces; ++i) {
            const Piece& piece = pieces_[i];
            if (vectors_.size() > first &&
                static_cast<std::byte*>(vectors_.back().iov_base) + vectors_.back().iov_len == piece.memory)
                vectors_.back().iov_len += piece.bytes;
            else
                vectors_.push_back({piece.memory, piece.bytes});
        }
        iocb block{};
        block.aio_data = blocks_.size();
        block.aio_lio_opcode = direction == Direction::read ? IOCB_CMD_PREADV : IOCB_CMD_PWRITEV;
        block.aio_fildes = static_cast<std::uint32_t>(fd_);
        block.aio_buf = reinterpret_cast<std::uintptr_t>(&vectors_[first]);
        block.aio_nbytes = vectors_.size() - first;
        block.aio_offset = static_cast<std::int64_t>(pieces_[operation.first_piece].file_offset);
        blocks_.push_back(block);
        block_pointers_.push_back(&blocks_.back());
    }
}

void SlabIo::run(const Request& request, std::int32_t* errors) {
    std::size_t next = 0, in_flight = 0;
    while (next < operations_.size() || in_flight > 0) {
        while (next < operations_.size() && in_flight < depth_) {
            const std::size_t refused_before = next;
            const std::size_t accepted = submit(next, depth_ - in_flight, in_flight, errors);
            next += accepted;
            in_flight += accepted;
            if (accepted > 0) continue;
            if (operations_[refused_before].done)
                ++next;  // refused for good
            else if (in_flight > 0)
                break;  // no room in the kernel until something completes
        }
        if (in_flight > 0 && !reap(in_flight, errors)) return lose(errors);
        // One checksum at a time: the device has work meanwhile, and gets more before the next one.
        if (!landed_.empty()) sum_one(request);
    }
}

// How many operations from `next` on the kernel took. If none, the first one is either done, because it was refused for good,
// or may be submitted again.
std::size_t SlabIo::submit(std::size_t next, std::size_t room, std::size_t in_flight, std::int32_t* errors) {
    const std::size_t count = std::min(room, operations_.size() - next);
    const long accepted = syscall(SYS_io_submit, context_, static_cast<long>(count), &block_pointers_[next]);
    if (accepted > 0) return static_cast<std::size_t>(accepted);
    const int code = accepted == 0 ? EAGAIN : errno;
    if (code == EINTR) return 0;
    if (code == EAGAIN) {
        if (in_flight > 0) return 0;
        if (patience_ > 0) {
            --patience_;
            pause_ms();
            return 0;
        }
    }
    finish(operations_[next], -code, errors);
    return 0;
}

// Waits for at least one completion, unless there is a checksum to compute. False if the kernel reports no more.
bool SlabIo::reap(std::size_t& in_flight, std::int32_t* errors) {
    const long least = landed_.empty() ? 1 : 0;
    const long found = syscall(SYS_io_getevents, context_, least, static_cast<long>(events_.size()), events_.data(), nullptr);
    if (found < 0) return errno == EINTR;
    for (long i = 0; i < found; ++i) finish(operations_[events_[i].data], events_[i].res, errors);
    in_flight -= static_cast<std::size_t>(found);
    if (found > 0 && progress_.words != nullptr) progress_.words->store(progress_.index, now_ns());
    return true;
}

void SlabIo::finish(Operation& operation, std::int64_t result, std::int32_t* errors) {
    operation.done = true;
    if (result == static_cast<std::int64_t>(operation.bytes)) return land(operation);
    const auto code = static_cast<std::int32_t>(result < 0 ? -result : EIO);
    const bool passing = (code == EINTR || code == EAGAIN) && operation.attempt < kAttemptsMax;
    if (operation.pieces == 1 && !passing) {
        std::int32_t& error = errors[pieces_[operation.first_piece].row];
        if (error == 0) error = code;
        return;
    }
    // One bad page does not fail its neighbours.
    for (std::size_t i = 0; i < operation.pieces; ++i)
        again_.push_back({operation.first_piece + i, 1, pieces_[operation.first_piece + i].bytes, operation.attempt + 1, false});
}

void SlabIo::land(const Operation& operation) {
    if (pieces_left_.empty()) return;
    for (std::size_t i = operation.first_piece; i < operation.first_piece + operation.pieces; ++i)
        if (const std::size_t row = pieces_[i].row; --pieces_left_[row] == 0) landed_.push_back(row);
}

void SlabIo::sum_one(const Request& request) {
    const std::size_t row = landed_.back();  // the latest one, which may still be in the caches
    landed_.pop_back();
    request.sums[row] = xxh3_64(request.memory + request.memory_offsets[row], request.data_bytes[row]);
}

// The last resort: destroying the context waits for everything in flight.
void SlabIo::lose(std::int32_t* errors) {
    close();
    for (const Operation& operation : operations_)
        for (std::size_t i = 0; i < operation.pieces && !operation.done; ++i)
            errors[pieces_[operation.first_piece + i].row] = EIO;
    for (const Operation& operation : again_) errors[pieces_[operation.first_piece].row] = EIO;
    again_.clear();
}

}  // namespace kvtier::slab
