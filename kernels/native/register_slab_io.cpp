#include <Python.h>

#include <system_error>

#include "arrays.hpp"
#include "one_caller.hpp"
#include "register.hpp"
#include "shared_words.hpp"
#include "slab_io.hpp"

namespace kvtier {

namespace {

using slab::Direction;

class GuardedSlabIo : public OneCaller<slab::SlabIo> {
   public:
    GuardedSlabIo(int fd, unsigned depth, slab::Progress progress) : OneCaller("SlabIo", fd, depth, progress) {}
};

// Raises OSError with the system's errno and our sentence.
[[noreturn]] void raise_os_error(const std::system_error& error) {
    const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    throw nb::python_error();
}

void make(GuardedSlabIo* place, int fd, unsigned depth, SharedWords* progress, std::size_t progress_index) {
    try {
        new (place) GuardedSlabIo(fd, depth, {progress, progress_index});
    } catch (const std::system_error& error) {
        raise_os_error(error);
    }
}

// The arguments that a read and a write have in common.
struct Rows {
    Rows(ArrayArg<std::uint8_t> memory_arg, bool writable, ArrayArg<std::uint64_t> memory_offsets,
         ArrayArg<std::uint64_t> file_offsets, ArrayArg<std::uint64_t> lengths)
        : memory(memory_arg, "memory", writable),
          places(memory_offsets, "memory_offsets"),
          offsets(file_offsets, "file_offsets"),
          bytes(lengths, "lengths") {
        offsets.require_rows(places.rows(), "memory_offsets");
        bytes.require_rows(places.rows(), "memory_offsets");
    }

    slab::Request request() const {
        return {reinterpret_cast<std::byte*>(memory.data()), memory.size(), places.span(), offsets.span(), bytes.span()};
    }

    In<std::uint8_t> memory;
    In<std::uint64_t> places, offsets, bytes;
};

Array<std::int32_t> write(GuardedSlabIo& guarded, ArrayArg<std::uint8_t> memory, ArrayArg<std::uint64_t> memory_offsets,
                          ArrayArg<std::uint64_t> file_offsets, ArrayArg<std::uint64_t> lengths) {
    const Rows rows(memory, false, memory_offsets, file_offsets, lengths);
    const Array<std::int32_t> errors = make_array<std::int32_t>(rows.places.rows());
    const GuardedSlabIo::Entered slab(guarded);
    const nb::gil_scoped_release release;
    slab->transfer(Direction::write, rows.request(), errors.data);
    return errors;
}

nb::tuple read(GuardedSlabIo& guarded, ArrayArg<std::uint8_t> memory, ArrayArg<std::uint64_t> memory_offsets,
               ArrayArg<std::uint64_t> file_offsets, ArrayArg<std::uint64_t> lengths, ArrayArg<std::uint64_t> data_bytes) {
    const Rows rows(memory, true, memory_offsets, file_offsets, lengths);
    const In<std::uint64_t> to_sum(data_bytes, "data_bytes");
    to_sum.require_rows(rows.places.rows(), "memory_offsets");
    const Array<std::int32_t> errors = make_array<std::int32_t>(rows.places.rows());
    const Array<std::uint64_t> sums = make_array<std::uint64_t>(rows.places.rows());
    {
        const GuardedSlabIo::Entered slab(guarded);
        const nb::gil_scoped_release release;
        slab::Request request = rows.request();
        request.data_bytes = to_sum.span();
        request.sums = sums.data;
        slab->transfer(Direction::read, request, errors.data);
    }
    return nb::make_tuple(errors.object, sums.object);
}

void close(GuardedSlabIo& guarded) {
    const GuardedSlabIo::Entered slab(guarded);
    const nb::gil_scoped_release release;
    slab->close();
}

}  // namespace

void register_slab_io(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<GuardedSlabIo>(
        module, "SlabIo",
        "Reads and writes whole pages between memory and a file, many at once (Linux native AIO). A call returns when all of\n"
        "its operations have ended, whatever signals come, so no device touches the memory afterwards. The interpreter's\n"
        "lock is released meanwhile.\n\n"
        "It has one caller: a call while another runs raises RuntimeError. All rows are checked before anything is\n"
        "submitted: a ValueError names argument, index and value.")
        .def("__init__", &make, "fd"_a, "depth"_a, "progress"_a.none() = nb::none(), "progress_index"_a = 0,
             nb::keep_alive<1, 4>(),
             "Works on a duplicate of `fd`, with up to `depth` operations (1 to 2^20) in flight. A descriptor opened without\n"
             "O_DIRECT works as well, but one operation after the other. The word `progress_index` of `progress` receives the\n"
             "time of completions, in nanoseconds of CLOCK_MONOTONIC. Raises OSError, with EAGAIN if the machine's limit of\n"
             "asynchronous operations (fs.aio-max-nr) is used up.")
        .def("read", &read, "memory"_a, "memory_offsets"_a, "file_offsets"_a, "lengths"_a, "data_bytes"_a,
             nb::sig("def read(self, memory: numpy.typing.NDArray[numpy.uint8], memory_offsets: "
                     "numpy.typing.NDArray[numpy.uint64], file_offsets: numpy.typing.NDArray[numpy.uint64], lengths: "
                     "numpy.typing.NDArray[numpy.uint64], data_bytes: numpy.typing.NDArray[numpy.uint64]) -> "
                     "tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.uint64]]"),
             "Reads `lengths[i]` bytes at `file_offsets[i]` into `memory`, uint8 of any size, at `memory_offsets[i]`. These three\n"
             "are uint64 of shape (n,) and multiples of PAGE_BYTES, as is the address of `memory`. Rows must not overlap in\n"
             "memory. They are read in the order of the file, and neighbours in it together, up to 1 MiB.\n\n"
             "Returns 0 or an errno for each row, int32 of shape (n,), and xxh3_64 of the first `data_bytes[i]` bytes of each row,\n"
             "uint64 (n,), 0 where it has an error. A row's checksum is computed as soon as the row is there, while others are\n"
             "still being read. A row that is not there as a whole has EIO. When several rows fail together, each is tried alone.")
        .def("write", &write, "memory"_a, "memory_offsets"_a, "file_offsets"_a, "lengths"_a,
             "Writes from `memory` to the file, with arguments as for `read`. Rows must not overlap in the file. Returns 0 or an\n"
             "errno for each row. What is in the file at a row with an error is not known. Nothing is flushed.")
        .def("close", &close, "Releases the context and the descriptor. Every later read or write raises ValueError.")
        .def("__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> typing.Self"))
        .def("__exit__", [](GuardedSlabIo& self, nb::args) { close(self); },
             nb::sig("def __exit__(self, *exception: object) -> None"));
}

}  // namespace kvtier
