// Reads and writes of a slab file, many in flight at once, by Linux native AIO and raw system calls. That needs no library,
// and works in containers that may not use io_uring.
#pragma once

#include <linux/aio_abi.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "words.hpp"

namespace kvtier::slab {

inline constexpr std::uint64_t page_bytes = 4096;
// Neighbours in the file become one operation up to this size, and longer ones become several.
inline constexpr std::uint64_t operation_bytes_max = 1u << 20;
inline constexpr unsigned depth_max = 1u << 20;  // the machine has a limit of its own, fs.aio-max-nr

enum class Direction { read, write };

// What to transfer between memory and file: row i is a slot, anywhere in either.
struct Request {
    std::byte* memory;  // only read when writing to the file
    std::uint64_t memory_bytes;
    std::span<const std::uint64_t> memory_offsets, file_offsets, lengths;
    // For a read: of how many bytes of each row to compute the checksum, and where to put it; 0 where the row has an error.
    std::span<const std::uint64_t> data_bytes = {};
    std::uint64_t* sums = nullptr;
};

// A word to which the time of each completion is stored, as nanoseconds of CLOCK_MONOTONIC.
struct Progress {
    Words* words = nullptr;
    std::size_t index = 0;
};

// For one thread at a time.
class SlabIo {
   public:
    // Works on a duplicate of the descriptor. Throws std::system_error if the kernel does not give a context for `depth`
    // operations.
    SlabIo(int fd, unsigned depth, Progress progress);
    SlabIo(const SlabIo&) = delete;
    SlabIo& operator=(const SlabIo&) = delete;
    ~SlabIo() { close(); }

    // Writes 0 or an errno for each row. Throws std::invalid_argument, with nothing submitted, for rows that are not whole
    // pages, reach beyond the memory, or overlap where they are written. Nothing is in flight when it returns or throws.
    void transfer(Direction direction, const Request& request, std::int32_t* errors);
    void close();

   private:
    // A slot, or 1 MiB of a long one.
    struct Piece {
        std::uint64_t file_offset, bytes;
        std::byte* memory;
        std::size_t row;
    };
    // Pieces that follow each other in the file.
    struct Operation {
        std::size_t first_piece, pieces;
        std::uint64_t bytes;
        unsigned attempt;
        bool done;
    };

    void cut_into_pieces(Direction direction, const Request& request);
    void merge_pieces();
    void add_operation(std::size_t first_piece, std::size_t pieces, unsigned attempt);
    void prepare(Direction direction);
    void run(const Request& request, std::int32_t* errors);
    std::size_t submit(std::size_t next, std::size_t room, std::size_t in_flight, std::int32_t* errors);
    bool reap(std::size_t& in_flight, std::int32_t* errors);
    void finish(Operation& operation, std::int64_t result, std::int32_t* errors);
    void land(const Operation& operation);
    void sum_one(const Request& request);
    void lose(std::int32_t* errors);

    int fd_ = -1;
    unsigned depth_;
    Progress progress_;
    aio_context_t context_ = 0;
    // These belong to the current call, and are kept between calls for their memory. All of it is allocated before the first
    // operation is submitted, because nothing may throw from then on.
    std::vector<Piece> pieces_;
    std::vector<Operation> operations_, again_;
    std::vector<iovec> vectors_;
    std::vector<iocb> blocks_;
    std::vector<iocb*> block_pointers_;
    std::vector<io_event> events_;
    std::vector<std::size_t> pieces_left_;  // for each row that needs a checksum
    std::vector<std::size_t> landed_;       // rows that have landed as a whole and have no checksum yet
    unsigned patience_ = 0;  // pauses left in this call for a kernel that has no room
};

}  // namespace kvtier::slab
