#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "pool_records.hpp"
#include "register.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvtier {

namespace {

using U8 = ArrayArg<std::uint8_t>;
using U32 = ArrayArg<std::uint32_t>;
using U64 = ArrayArg<std::uint64_t>;

std::uint16_t narrow(const char* name, std::uint64_t value) {
    if (value > 0xffff) refuse(name, " ", value, ": expected at most 65535");
    return static_cast<std::uint16_t>(value);
}

const std::uint8_t* sixteen(const char* name, const nb::bytes& value) {
    if (value.size() != 16) refuse(name, " has ", value.size(), " bytes; expected 16");
    return reinterpret_cast<const std::uint8_t*>(value.data());
}

// Records over a Python buffer, which stays exported as long as this object lives.
class PoolRecords {
   public:
    PoolRecords(U8 pool, std::uint64_t crash_after)
        : pool_(pool, "pool", true),
          records_(pool_.data(), pool_.size(), crash_after) {}

    pool::Records& records() { return records_; }

    Array<std::uint64_t> open(U32 slots, std::uint64_t writer, std::uint64_t boot_nonce, std::uint64_t transfer,
                              const nb::bytes& name, std::uint64_t group, std::uint64_t shard, std::uint64_t world, U8 hashes,
                              std::uint64_t data_bytes) {
        const In<std::uint32_t> places(slots, "slots");
        const In<std::uint8_t, 2> keys(hashes, "hashes");
        keys.require_rows(places.size(), "slots").require_columns(32);
        if (data_bytes > 0xffff'ffff) refuse("data_bytes ", data_bytes, ": expected at most 32 bits");
        const pool::OpenFields fields{.writer = narrow("writer", writer),
                                      .group = narrow("group", group),
                                      .shard = narrow("shard", shard),
                                      .world = narrow("world", world),
                                      .data_bytes = static_cast<std::uint32_t>(data_bytes),
                                      .boot_nonce = boot_nonce,
                                      .transfer = transfer,
                                      .name = sixteen("namespace", name),
                                      .hashes = keys.data()};
        Array<std::uint64_t> generations = make_array<std::uint64_t>(places.size());
        nb::gil_scoped_release release;
        records_.open(places.span(), fields, generations.data);
        return generations;
    }

    void set_data_checksums(U32 slots, U64 generations, U64 sums) {
        const In<std::uint32_t> places(slots, "slots");
        const In<std::uint64_t> expected(generations, "generations"), values(sums, "sums");
        expected.require_rows(places.size(), "slots");
        values.require_rows(places.size(), "slots");
        nb::gil_scoped_release release;
        records_.set_data_checksums(places.span(), expected.data(), values.data());
    }

    Array<std::uint8_t> claim(U32 slots, U64 generations, std::uint64_t salt) {
        const In<std::uint32_t> places(slots, "slots");
        const In<std::uint64_t> expected(generations, "generations");
        expected.require_rows(places.size(), "slots");
        Array<std::uint8_t> out = make_array<std::uint8_t>(places.size());
        nb::gil_scoped_release release;
        records_.claim(places.span(), expected.data(), salt, out.data);
        return out;
    }

    void set_tags(U32 slots, U64 generations, U64 sums, U8 tags) {
        const In<std::uint32_t> places(slots, "slots");
        const In<std::uint64_t> expected(generations, "generations"), values(sums, "sums");
        const In<std::uint8_t, 2> marks(tags, "tags");
        expected.require_rows(places.size(), "slots");
        values.require_rows(places.size(), "slots");
        marks.require_rows(places.size(), "slots").require_columns(16);
        nb::gil_scoped_release release;
        records_.set_tags(places.span(), expected.data(), values.data(), marks.data());
    }

    Array<std::uint64_t> copies(U32 slots) const {
        const In<std::uint32_t> places(slots, "slots");
        Array<std::uint64_t> out = make_array<std::uint64_t>(places.size(), std::size_t{pool::record_words});
        nb::gil_scoped_release release;
        records_.copies(places.span(), out.data);
        return out;
    }

    void commit(U32 slots, U64 clocks) {
        const In<std::uint32_t> places(slots, "slots");
        const In<std::uint64_t> values(clocks, "clocks");
        values.require_rows(places.size(), "slots");
        nb::gil_scoped_release release;
        records_.commit(places.span(), values.data());
    }

    void free(U32 slots) {
        const In<std::uint32_t> places(slots, "slots");
        nb::gil_scoped_release release;
        records_.free(places.span());
    }

    Array<std::uint64_t> generations(U32 slots) const {
        const In<std::uint32_t> places(slots, "slots");
        Array<std::uint64_t> out = make_array<std::uint64_t>(places.size());
        nb::gil_scoped_release release;
        records_.generations(places.span(), out.data);
        return out;
    }

    template <auto check, class... More>
    Array<std::uint8_t> checked(U32 slots, U64 generations, More... more) const {
        const In<std::uint32_t> places(slots, "slots");
        const In<std::uint64_t> expected(generations, "generations");
        expected.require_rows(places.size(), "slots");
        Array<std::uint8_t> out = make_array<std::uint8_t>(places.size());
        nb::gil_scoped_release release;
        (records_.*check)(places.span(), expected.data(), more..., out.data);
        return out;
    }

    // Serves match and adopt, and with sums also accept.
    template <auto compare, class... Sums>
    Array<std::uint8_t> compared(U32 slots, U64 generations, PoolRecords& source, U32 source_slots, U64 source_generations,
                                 Sums... sums_arg) {
        const In<std::uint32_t> places(slots, "slots"), others(source_slots, "source_slots");
        const In<std::uint64_t> expected(generations, "generations"), others_expected(source_generations, "source_generations");
        const std::array<In<std::uint64_t>, sizeof...(Sums)> sums{In<std::uint64_t>(sums_arg, "sums")...};
        expected.require_rows(places.size(), "slots");
        others.require_rows(places.size(), "slots");
        others_expected.require_rows(places.size(), "slots");
        for (const auto& column : sums) column.require_rows(places.size(), "slots");
        Array<std::uint8_t> out = make_array<std::uint8_t>(places.size());
        nb::gil_scoped_release release;
        const pool::Source rows{source.records_, others.span(), others_expected.data()};
        if constexpr (sizeof...(Sums) == 1)
            (records_.*compare)(places.span(), expected.data(), rows, sums[0].data(), out.data);
        else
            (records_.*compare)(places.span(), expected.data(), rows, out.data);
        return out;
    }

    Array<std::uint64_t> data_bytes(U32 slots) const {
        const In<std::uint32_t> places(slots, "slots");
        Array<std::uint64_t> out = make_array<std::uint64_t>(places.size());
        nb::gil_scoped_release release;
        records_.data_bytes(places.span(), out.data);
        return out;
    }

    nb::tuple data_sums(U32 slots, U64 generations) const {
        const In<std::uint32_t> places(slots, "slots");
        const In<std::uint64_t> expected(generations, "generations");
        expected.require_rows(places.size(), "slots");
        const Array<std::uint64_t> sums = make_array<std::uint64_t>(places.size());
        const Array<std::uint8_t> ok = make_array<std::uint8_t>(places.size());
        {
            const nb::gil_scoped_release release;
            records_.data_sums(places.span(), expected.data(), sums.data, ok.data);
        }
        return nb::make_tuple(sums, ok);
    }

    Array<std::uint64_t> record_pages(U32 slots) const {
        const In<std::uint32_t> places(slots, "slots");
        std::vector<std::uint64_t> found;
        {
            const nb::gil_scoped_release release;
            found = records_.record_pages(places.span());
        }
        const Array<std::uint64_t> out = make_array<std::uint64_t>(found.size());
        std::copy(found.begin(), found.end(), out.data);
        return out;
    }

    std::pair<std::uint64_t, std::uint64_t> table_range(std::uint64_t extent) const {
        nb::gil_scoped_release release;
        return records_.table_range(extent);
    }

    void format_extent(std::uint64_t extent, std::uint64_t slot_bytes) {
        nb::gil_scoped_release release;
        records_.format_extent(extent, slot_bytes);
    }

    std::optional<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>> extent_info(std::uint64_t index) const {
        pool::Extent extent;
        if (!records_.extent(index, extent)) return std::nullopt;
        return std::tuple(extent.slot_bytes, extent.stride, extent.count, extent.slot_offset(0));
    }

    nb::dict scan() const {
        pool::Scan found;
        {
            nb::gil_scoped_release release;
            found = records_.scan();
        }
        nb::dict out;
        const auto give = [&out]<class T>(const char* name, std::vector<T>& values, std::size_t columns = 0) {
            const std::size_t rows = values.size() / (columns ? columns : 1);
            const Array<T> array = columns ? make_array<T>(rows, columns) : make_array<T>(rows);
            std::copy(values.begin(), values.end(), array.data);
            std::vector<T>().swap(values);
            out[name] = array;
        };
        give("extents", found.extents);
        give("extent_slot_bytes", found.extent_slot_bytes);
        give("extent_slots", found.extent_slots);
        give("broken_extents", found.broken_extents);
        give("slots", found.slots);
        give("states", found.states);
        give("intact", found.intact);
        give("writers", found.writers);
        give("generations", found.generations);
        give("nonces", found.nonces);
        give("transfers", found.transfers);
        give("clocks", found.clocks);
        give("namespaces", found.namespaces, 16);
        give("hashes", found.hashes, 32);
        give("data_bytes", found.data_bytes);
        give("groups", found.groups);
        give("shards", found.shards);
        give("worlds", found.worlds);
        give("space_keys", found.space_keys);
        give("block_keys", found.block_keys);
        give("copy_keys", found.copy_keys);
        return out;
    }

   private:
    In<std::uint8_t> pool_;
    pool::Records records_;
};

[[noreturn]] void raise_errno(int code) {
    errno = code;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

void populate(U8 pool, std::uint64_t offset, std::uint64_t bytes) {
    const In<std::uint8_t> memory(pool, "pool", true);
    if (offset > memory.size() || bytes > memory.size() - offset)
        refuse("length ", bytes, " at offset ", offset, " reaches beyond the pool's ", memory.size(), " bytes");
    int code = 0;
    {
        nb::gil_scoped_release release;
        if (madvise(memory.data() + offset, bytes, MADV_POPULATE_WRITE) != 0) code = errno;
    }
    if (code != 0) raise_errno(code);
}

}  // namespace

void register_pool(nb::module_& module) {
    using nb::arg;
    nb::class_<PoolRecords>(
        module, "PoolRecords",
        "Slot records of a pool file (format 1, or 2 for a slab that holds ciphertext): the only code that changes a slot's state.\n\n"
        "`pool` is the whole file, mapped writable, uint8. Slots are page numbers, uint32 of shape (n,). Every batch is\n"
        "checked before anything changes: ValueError names the slot, what was expected and what was found. Whatever the\n"
        "pool's bytes say, nothing outside it is touched. The interpreter's lock is released in every call.")
        .def(nb::init<U8, std::uint64_t>(), arg("pool"), arg("crash_after") = 0,
             "Raises ValueError if the header is not one of format 1 or 2 or does not fit the size of `pool`. With `crash_after`\n"
             "n > 0 the process kills itself (SIGKILL) right after its nth persisted step: for tests.")
        .def("open", &PoolRecords::open, arg("slots"), arg("writer"), arg("boot_nonce"), arg("transfer"), arg("namespace"),
             arg("group"), arg("shard"), arg("world"), arg("hashes"), arg("data_bytes"),
             "Makes FREE slots WRITING, with a new generation, for one shard of the blocks with these hashes, shape (n, 32).\n"
             "`namespace` is the 16-byte digest of theirs. Returns the generations, uint64 (n,).")
        .def("set_data_checksums", &PoolRecords::set_data_checksums, arg("slots"), arg("generations"), arg("sums"),
             "Records the xxh3_64 of the data of slots that are WRITING with these generations.")
        .def("claim", &PoolRecords::claim, arg("slots"), arg("generations"), arg("salt"),
             "For a slab of format 2. Notes in records that are WRITING with these generations, and that nobody has claimed,\n"
             "with which `salt`, 1 to 2^48 - 1, their data will be encrypted. 1 where that was done, else 0; uint8 (n,). So no\n"
             "generation of a slot is encrypted twice.")
        .def("set_tags", &PoolRecords::set_tags, arg("slots"), arg("generations"), arg("sums"), arg("tags"),
             "For a slab of format 2. As `set_data_checksums`, with sums that are masked, and with the tags of the ciphertext,\n"
             "uint8 (n, 16).")
        .def("copies", &PoolRecords::copies, arg("slots"),
             "The records of slots, in whatever state, word by word, uint64 (n, 16).")
        .def("commit", &PoolRecords::commit, arg("slots"), arg("clocks"), "Makes WRITING slots READY, each with its recency.")
        .def("free", &PoolRecords::free, arg("slots"), "Makes slots in any state FREE, with a new generation.")
        .def("generations", &PoolRecords::generations, arg("slots"), "The present generation of each slot, uint64 (n,).")
        .def("check", &PoolRecords::checked<&pool::Records::check, std::optional<std::uint64_t>>, arg("slots"),
             arg("generations"), arg("data_bytes") = nb::none(),
             "1 where a slot is READY with this generation, its record can be believed and, if `data_bytes` is given, it holds\n"
             "so many, else 0; uint8 (n,). A page that is not a slot gives 0 as well. After a copy, 1 says that the copied bytes\n"
             "were the slot's.")
        .def("check_writing", &PoolRecords::checked<&pool::Records::check_writing, std::optional<std::uint64_t>>, arg("slots"),
             arg("generations"), arg("data_bytes") = nb::none(),
             "1 where a slot is WRITING with this generation and, if `data_bytes` is given, for so many, else 0; uint8 (n,).\n"
             "A page that is not a slot gives 0 as well.")
        .def("verify_data", &PoolRecords::checked<&pool::Records::verify_data>, arg("slots"), arg("generations"),
             "As `check`, and the data checksum must match the slot's data bytes, which are all read.")
        .def("match", &PoolRecords::compared<&pool::Records::match>, arg("slots"), arg("generations"), arg("source"),
             arg("source_slots"), arg("source_generations"),
             "1 where a slot is WRITING with its generation, the slot of `source` is READY with its own, the record there can be\n"
             "believed, and both are the same shard of the same block: namespace, group, shard, world size, hash and data bytes\n"
             "are equal. Else 0; uint8 (n,). A page that is not a slot gives 0 as well. `source` may be any pool. Its slots are\n"
             "uint32 and their generations uint64, of shape (n,).")
        .def("adopt", &PoolRecords::compared<&pool::Records::adopt>, arg("slots"), arg("generations"), arg("source"),
             arg("source_slots"), arg("source_generations"),
             "As `match`; where it is 1, this slot takes over the source's data checksum. After a copy of the source's data, 1\n"
             "says that the copied bytes are those of the checksum, or have rotted since.")
        .def("accept", &PoolRecords::compared<&pool::Records::accept, U64>, arg("slots"), arg("generations"), arg("source"),
             arg("source_slots"), arg("source_generations"), arg("sums"),
             "For use after the source's data were read into these slots. As `match`, but 1 only if `sums`, xxh3_64 of the data\n"
             "bytes that are in each slot now, uint64 (n,), is the source's data checksum, which this slot then takes over. 2 if\n"
             "the records match, but the data do not.")
        .def("data_bytes", &PoolRecords::data_bytes, arg("slots"),
             "How many data bytes each slot's record says that it has, in whatever state, uint64 (n,); 0 if it was never opened.\n"
             "Raises ValueError if they are more than the slot's.")
        .def("data_sums", &PoolRecords::data_sums, arg("slots"), arg("generations"),
             nb::sig("def data_sums(self, slots: numpy.typing.NDArray[numpy.uint32], generations: "
                     "numpy.typing.NDArray[numpy.uint64]) -> tuple[numpy.typing.NDArray[numpy.uint64], "
                     "numpy.typing.NDArray[numpy.uint8]]"),
             "The data checksum of each slot, uint64 (n,), and what `check` returns, uint8 (n,). Where that is 0, so is the sum.")
        .def("record_pages", &PoolRecords::record_pages, arg("slots"),
             "File offsets of the pages that hold the slots' records, each once, in rising order; uint64 (m,).")
        .def("table_range", &PoolRecords::table_range, arg("extent"),
             "(file offset, bytes) of the slot table of an extent in use, both multiples of PAGE_BYTES; its header page lies\n"
             "before it. Raises ValueError if the extent is not in use.")
        .def("format_extent", &PoolRecords::format_extent, arg("extent"), arg("slot_bytes"),
             "Divides an extent into FREE slots of this size; generations in it go on rising. Raises ValueError if one of its\n"
             "slots is not FREE, or if no slot of this size fits.")
        .def("extent_info", &PoolRecords::extent_info, arg("extent"),
             "(slot bytes, stride, slots, file offset of the first slot) of an extent in use, else None.")
        .def("scan", &PoolRecords::scan,
             nb::sig("def scan(self) -> dict[str, numpy.typing.NDArray[typing.Any]]"),
             "Every extent in use and every slot that is not FREE, as a dict of arrays with one row each. `intact`: READY, and\n"
             "the record can be believed. `space_keys`: a checksum of namespace, group and world size; `block_keys`: of these and\n"
             "the hash; `copy_keys`: of these and the store id. `broken_extents`: extents whose headers cannot be believed.")
        .def(
            "start_boot", [](PoolRecords& self, std::uint64_t nonce) { return self.records().start_boot(nonce); },
            arg("boot_nonce"), "Writes the nonce of this boot into the header and counts the boot. Returns the count.")
        .def_prop_ro("encrypted", [](PoolRecords& self) { return self.records().encrypted(); }, "Whether it has format 2.")
        .def_prop_ro("boots", [](PoolRecords& self) { return self.records().boots(); }, "Boots since the pool was made.")
        .def_prop_ro("extents", [](PoolRecords& self) { return self.records().extents(); }, "Number of extents.")
        .def_prop_ro(
            "populated", [](PoolRecords& self) { return self.records().populated(); },
            "How many extents, from the first on, have memory. The others count as not in use, and are never touched.")
        .def(
            "set_populated", [](PoolRecords& self, std::uint64_t extents) { self.records().set_populated(extents); },
            arg("extents"), "Notes that the first `extents` extents have memory. Raises ValueError for fewer than before.")
        .def_prop_ro("extent_bytes", [](PoolRecords& self) { return self.records().extent_bytes(); }, "Bytes per extent.")
        .def_prop_ro(
            "persisted_steps", [](PoolRecords& self) { return self.records().persisted_steps(); },
            "Steps that this object has persisted so far: each store of a word, checksum, clock or header, or group of fields.");

    module.def(
        "format_pool",
        [](U8 pool, std::uint64_t extent_bytes, std::uint64_t extents, const nb::bytes& digest, std::uint64_t crash_after,
           bool encrypted, std::optional<std::uint64_t> populated) {
            const In<std::uint8_t> memory(pool, "pool", true);
            const std::uint8_t* bytes = sixteen("config_digest", digest);
            nb::gil_scoped_release release;
            pool::Records::format(memory.data(), memory.size(), extent_bytes, extents, bytes, crash_after, encrypted,
                                  populated.value_or(extents));
        },
        arg("pool"), arg("extent_bytes"), arg("extents"), arg("config_digest"), arg("crash_after") = 0,
        arg("encrypted") = false, arg("populated") = nb::none(),
        "Writes the header of a new pool file, with its magic last and no extent in use; with `encrypted`, of a slab of format 2,\n"
        "which holds ciphertext. Only the first `populated` extents have memory; None for all. Raises ValueError, and changes\n"
        "nothing, if the extents do not fit.");
    module.def("populate", &populate, arg("pool"), arg("offset"), arg("length"),
               "Prefaults pages for writing, with the interpreter's lock released. Raises OSError: EFAULT when the file system is\n"
               "full, EINVAL when the kernel is older than 5.14.");
}

}  // namespace kvtier
