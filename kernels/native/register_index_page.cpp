#include <algorithm>
#include <array>
#include <cstring>

#include "register.hpp"
#include "shared_index_page.hpp"

namespace kvtier {

namespace {

// Hashes that are looked for together.
constexpr std::size_t kGroup = 16;

class Reader {
   public:
    Reader(BufferArg buffer, std::size_t hash_bytes)
        : buffer_(buffer.object, "buffer", false), reader_(buffer_.data(), buffer_.bytes()), hash_bytes_(hash_bytes) {
        if (hash_bytes == 0 || hash_bytes > kHashBytes) refuse("hash_bytes is ", hash_bytes, "; expected 1 to ", kHashBytes);
    }

    bool complete() const { return reader_.complete(); }
    std::uint64_t boot_nonce() const { return reader_.boot_nonce(); }

    // Takes any sequence of bytes objects.
    std::size_t run(nb::sequence hashes, std::size_t first, std::size_t end) const {
        const nb::object fast = as_fast(hashes);
        end = std::min(end, count_of(fast));
        const std::size_t stop = first_that(fast, first, end, false);
        return stop > first ? stop - first : 0;
    }

    bool any(nb::sequence hashes) const {
        const nb::object fast = as_fast(hashes);
        const std::size_t count = count_of(fast);
        return first_that(fast, 0, count, true) < count;
    }

   private:
    static nb::object as_fast(const nb::sequence& hashes) {
        nb::object fast = nb::steal(PySequence_Fast(hashes.ptr(), "hashes is no sequence"));
        if (!fast.is_valid()) throw nb::python_error();
        return fast;
    }

    static std::size_t count_of(const nb::object& fast) {
        return static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
    }

    // The first of the hashes from `first` to `end` that is there, or that is not; else `end`.
    std::size_t first_that(const nb::object& fast, std::size_t first, std::size_t end, bool is_there) const {
        std::array<std::uint8_t, kHashBytes> key{};
        std::array<IndexWords::Place, kGroup> places;
        for (std::size_t start = first, size = 1; start < end; start += size, size = std::min(kGroup, end - start)) {
            // The first hash is looked for alone, because it is the one that is missing most often.
            for (std::size_t i = 0; i < size; ++i) {
                PyObject* const hash = PySequence_Fast_GET_ITEM(fast.ptr(), static_cast<Py_ssize_t>(start + i));
                if (!PyBytes_Check(hash) || static_cast<std::size_t>(PyBytes_GET_SIZE(hash)) != hash_bytes_)
                    refuse("hashes[", start + i, "] is no bytes object of ", hash_bytes_, " bytes");
                std::memcpy(key.data(), PyBytes_AS_STRING(hash), hash_bytes_);
                places[i] = reader_.place(key.data());
                reader_.prefetch(places[i]);
            }
            for (std::size_t i = 0; i < size; ++i)
                if (reader_.has(places[i]) == is_there) return start + i;
        }
        return end;
    }

    Buffer buffer_;
    IndexReader reader_;
    std::size_t hash_bytes_;
};

}  // namespace

void register_index_page(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<SharedIndexPage>(
        module, "IndexPage",
        "A set of block hashes in shared memory, which clients read while a BlockTable writes it (`BlockTable.publish`).\n"
        "It is advisory: a few hashes may be left out.")
        .def(nb::init<BufferArg, std::uint64_t, std::uint64_t>(), "buffer"_a, "boot_nonce"_a, "seed"_a,
             "Makes an empty page in a writable buffer of zeros that is as long as `bytes_for` says. `seed` keys the hash\n"
             "function. Raises ValueError for a buffer of another size, or one that is not aligned to cache lines.")
        .def_static("bytes_for", &SharedIndexPage::bytes_for, "blocks"_a, "Bytes of a page with room for so many hashes.")
        .def("complete", &SharedIndexPage::complete,
             "From now on clients rely on it that a hash that is missing is not there.")
        .def("incomplete", &SharedIndexPage::incomplete, "From now on clients ask about every hash.")
        .def_prop_ro("left_out", &SharedIndexPage::left_out, "How many hashes found no place.");
    nb::class_<Reader>(module, "IndexReader", "A client's view of an index page, for use in any thread.")
        .def(nb::init<BufferArg, std::size_t>(), "buffer"_a, "hash_bytes"_a,
             "`hash_bytes` is the length of one block hash, 1 to 32. Raises ValueError if the buffer is not an index page.")
        .def_prop_ro("complete", &Reader::complete, "If False, a hash that is missing may be there all the same.")
        .def_prop_ro("boot_nonce", &Reader::boot_nonce, "The boot nonce of the daemon that writes the page.")
        .def("run", &Reader::run, "hashes"_a, "first"_a, "end"_a,
             nb::sig("def run(self, hashes: collections.abc.Sequence[bytes], first: int, end: int) -> int"),
             "How many of `hashes[first:end]` are there, up to the first that is not. Raises ValueError for a hash of another\n"
             "length.")
        .def("any", &Reader::any, "hashes"_a,
             nb::sig("def any(self, hashes: collections.abc.Sequence[bytes]) -> bool"),
             "Whether at least one of them is there. Raises ValueError for a hash of another length, unless one that is there\n"
             "comes before.");
}

}  // namespace kvtier
