#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>

#include "arrays.hpp"
#include "block_table.hpp"
#include "gil.hpp"
#include "hold_counts.hpp"
#include "one_caller.hpp"
#include "register.hpp"
#include "shadow.hpp"
#include "shared_index_page.hpp"

namespace kvtier {

namespace {

using EntriesArg = ArrayArg<std::uint32_t>;
using HashesArg = ArrayArg<std::uint8_t>;

std::uint64_t random_seed() {
    std::random_device device;
    return static_cast<std::uint64_t>(device()) << 32 | device();
}

// Sections without the GIL make two callers at once possible. That is a bug of the caller, for which a call throws, so that
// nobody reads torn metadata.
class GuardedTable : public OneCaller<BlockTable> {
   public:
    GuardedTable(std::size_t capacity, std::size_t pool_pages, std::optional<std::uint64_t> seed, bool ranks,
                 std::size_t history_blocks)
        : OneCaller("BlockTable", capacity, pool_pages, seed ? *seed : random_seed(), ranks, history_blocks) {}
};

using Table = GuardedTable::Entered;

class Hashes : public In<std::uint8_t, 2> {
   public:
    explicit Hashes(HashesArg arg) : In(arg, "hashes") { require_columns(kHashBytes); }
};

class Entries : public In<std::uint32_t> {
   public:
    explicit Entries(EntriesArg arg) : In(arg, "entries") {}
};

nb::tuple lookup(GuardedTable& guarded, std::uint32_t space, HashesArg hashes_arg) {
    const Hashes hashes(hashes_arg);
    Array<std::uint32_t> entries = make_array<std::uint32_t>(hashes.rows());
    Array<std::uint8_t> states = make_array<std::uint8_t>(hashes.rows());
    {
        const Table table(guarded);
        const ReleaseGilIf release(hashes.rows() >= kReleaseRows);
        table->lookup(space, hashes.span(), entries.data, states.data);
    }
    return nb::make_tuple(entries, states);
}

nb::tuple lookup_prefix(GuardedTable& guarded, std::uint32_t space, HashesArg hashes_arg) {
    const Hashes hashes(hashes_arg);
    Array<std::uint32_t> entries = make_array<std::uint32_t>(hashes.rows());
    std::uint8_t ended = 0;
    std::size_t length = 0;
    {
        const Table table(guarded);
        const ReleaseGilIf release(hashes.rows() >= kReleaseRows);
        length = table->lookup_prefix(space, hashes.span(), entries.data, &ended);
    }
    if (length == hashes.rows()) return nb::make_tuple(entries, int{ended});
    Array<std::uint32_t> run = make_array<std::uint32_t>(length);
    if (length != 0) std::memcpy(run.data, entries.data, length * sizeof(std::uint32_t));
    return nb::make_tuple(run, int{ended});
}

void check_flags(std::uint16_t flags) {
    if (flags > kFlags) refuse("flags is ", flags, "; expected at most ", kFlags);
}

nb::tuple insert(GuardedTable& guarded, std::uint32_t space, std::uint16_t domain, HashesArg hashes_arg,
                 std::uint16_t flags) {
    check_flags(flags);
    const Hashes hashes(hashes_arg);
    Array<std::uint32_t> entries = make_array<std::uint32_t>(hashes.rows());
    Array<std::uint8_t> created = make_array<std::uint8_t>(hashes.rows());
    {
        const Table table(guarded);
        const ReleaseGilIf release(hashes.rows() >= kReleaseRows);
        table->insert(space, domain, hashes.span(), flags, entries.data, created.data);
    }
    return nb::make_tuple(entries, created);
}

void attach_slots(GuardedTable& guarded, EntriesArg entries_arg, ArrayArg<std::uint32_t> slots_arg) {
    const Entries entries(entries_arg);
    const In<std::uint32_t, 2> slots(slots_arg, "slots");
    slots.require_rows(entries.rows(), "entries");
    const Table table(guarded);
    const ReleaseGilIf release(slots.size() >= kReleaseRows);
    table->attach_slots(entries.span(), slots.data(), slots.columns());
}

Array<std::uint32_t> slots(GuardedTable& guarded, EntriesArg entries_arg, std::uint32_t world) {
    const Entries entries(entries_arg);
    if (world > 65535) refuse("world is ", world, "; expected 1 to 65535");
    Array<std::uint32_t> out = make_array<std::uint32_t>(entries.rows(), world);
    const Table table(guarded);
    const ReleaseGilIf release(entries.rows() >= kReleaseRows);
    table->slots(entries.span(), world, out.data);
    return out;
}

Array<std::uint32_t> owners(GuardedTable& guarded, ArrayArg<std::uint32_t> slots_arg) {
    const In<std::uint32_t> input(slots_arg, "slots");
    Array<std::uint32_t> out = make_array<std::uint32_t>(input.rows());
    const Table table(guarded);
    const ReleaseGilIf release(input.rows() >= kReleaseRows);
    table->owners(input.span(), out.data);
    return out;
}

// A batch that moves entries from one state to another.
template <void (BlockTable::*Change)(BlockTable::Entries)>
void change(GuardedTable& guarded, EntriesArg entries_arg) {
    const Entries entries(entries_arg);
    const Table table(guarded);
    const ReleaseGilIf release(entries.rows() >= kReleaseRows);
    ((*table).*Change)(entries.span());
}

template <void (BlockTable::*Change)(BlockTable::Entries, std::uint16_t)>
void change_flags(GuardedTable& guarded, EntriesArg entries_arg, std::uint16_t flags) {
    check_flags(flags);
    const Entries entries(entries_arg);
    const Table table(guarded);
    ((*table).*Change)(entries.span(), flags);
}

// What `get` returns of each entry as an array.
template <auto Get>
auto each(GuardedTable& guarded, EntriesArg entries_arg) {
    using T = decltype(Get(std::declval<const BlockTable::Entry&>()));
    const Entries entries(entries_arg);
    Array<T> out = make_array<T>(entries.rows());
    const Table table(guarded);
    table->read(entries.span(), [&](std::size_t i, const BlockTable::Entry& entry) { out.data[i] = Get(entry); });
    return out;
}

Array<std::uint8_t> hashes_of(GuardedTable& guarded, EntriesArg entries_arg) {
    const Entries entries(entries_arg);
    Array<std::uint8_t> out = make_array<std::uint8_t>(entries.rows(), kHashBytes);
    const Table table(guarded);
    table->read(entries.span(), [&](std::size_t i, const BlockTable::Entry& entry) {
        std::memcpy(out.data + i * kHashBytes, entry.hash, kHashBytes);
    });
    return out;
}

Array<std::uint32_t> copied(const std::vector<std::uint32_t>& values) {
    Array<std::uint32_t> out = make_array<std::uint32_t>(values.size());
    if (!values.empty()) std::memcpy(out.data, values.data(), values.size() * sizeof(std::uint32_t));
    return out;
}

// Tables below one, which nobody else may change meanwhile.
class TablesBelow {
   public:
    explicit TablesBelow(const nb::sequence& tables) {
        for (const nb::handle each : tables) {
            entered_.emplace_back(nb::cast<GuardedTable&>(each));
            tables_.push_back(&*entered_.back());
        }
    }
    BlockTable::Tables span() const { return tables_; }

   private:
    std::list<Table> entered_;
    std::vector<BlockTable*> tables_;
};

void asked(GuardedTable& guarded, std::uint32_t space, std::uint16_t domain, HashesArg hashes_arg, nb::sequence below_arg) {
    const Hashes hashes(hashes_arg);
    const Table table(guarded);
    const TablesBelow below(below_arg);
    const ReleaseGilIf release(table->ranks() && hashes.rows() >= kReleaseRows);
    table->asked(space, domain, hashes.span(), below.span());
}

void asked_each(GuardedTable& guarded, EntriesArg entries_arg, nb::sequence below_arg) {
    const Entries entries(entries_arg);
    const Table table(guarded);
    const TablesBelow below(below_arg);
    table->asked_each(entries.span(), below.span());
}

void rank_below(GuardedTable& guarded, GuardedTable& above) {
    const Table table(guarded), other(above);
    const ReleaseGilIf release(true);
    table->rank_below(*other);
}

void same_as(GuardedTable& guarded, EntriesArg entries_arg, GuardedTable& above, EntriesArg of_arg) {
    const Entries entries(entries_arg), of(of_arg);
    const Table table(guarded), other(above);
    table->same_as(entries.span(), *other, of.span());
}

std::size_t admitted_of(GuardedTable& guarded, std::uint16_t domain, GuardedTable& above, EntriesArg entries_arg,
                        std::size_t free) {
    const Entries entries(entries_arg);
    const Table table(guarded), other(above);
    return table->admitted_of(domain, *other, entries.span(), free);
}

void rank(GuardedTable& guarded, std::size_t history_blocks) {
    const Table table(guarded);
    const ReleaseGilIf release(true);
    table->rank(history_blocks);
}

nb::bytes learnt(GuardedTable& guarded) {
    const Table table(guarded);
    const std::vector<std::byte> saved = table->learnt();
    return nb::bytes(saved.data(), saved.size());
}

bool restore_learnt(GuardedTable& guarded, nb::bytes saved) {
    const Table table(guarded);
    return table->restore_learnt({static_cast<const std::byte*>(saved.data()), saved.size()});
}

std::size_t admitted(GuardedTable& guarded, std::uint16_t domain, EntriesArg entries_arg, std::size_t free) {
    const Entries entries(entries_arg);
    const Table table(guarded);
    return table->admitted(domain, entries.span(), free);
}

Array<std::uint32_t> victims(GuardedTable& guarded, std::uint16_t domain, std::size_t n) {
    const Table table(guarded);
    std::vector<std::uint32_t> found(std::min(n, table->evictable(domain)));
    {
        const ReleaseGilIf release(found.size() >= kReleaseRows);
        found.resize(table->victims(domain, found.size(), found.data()));
    }
    return copied(found);
}

Array<std::uint32_t> coldest(GuardedTable& guarded, std::uint16_t domain, std::size_t n, std::uint16_t without_flags,
                             std::size_t horizon) {
    const Table table(guarded);
    const std::size_t steps = std::min(horizon, table->evictable(domain));
    std::vector<std::uint32_t> found(std::min(n, steps));
    {
        const ReleaseGilIf release(steps >= kReleaseRows);
        found.resize(table->coldest(domain, found.size(), without_flags, steps, found.data()));
    }
    return copied(found);
}

Array<std::uint32_t> entries_of(GuardedTable& guarded, std::uint32_t space) {
    const Table table(guarded);
    std::vector<std::uint32_t> found;
    {
        const nb::gil_scoped_release release;
        found = table->entries_of(space);
    }
    return copied(found);
}

nb::tuple ready_among(GuardedTable& guarded, std::uint32_t space, std::size_t first, std::size_t n) {
    const Table table(guarded);
    std::vector<std::uint32_t> found;
    std::size_t next = 0;
    {
        const nb::gil_scoped_release release;
        next = table->ready_among(space, first, n, found);
    }
    return nb::make_tuple(copied(found), next);
}

nb::dict stats(GuardedTable& guarded) {
    const Table table(guarded);
    const BlockTable::Stats stats = table->stats();
    nb::dict domains, out;
    for (const auto& [domain, blocks] : stats.domains) domains[nb::int_(domain)] = blocks;
    out["writing"] = stats.writing;
    out["ready"] = stats.ready;
    out["evicting"] = stats.evicting;
    out["capacity"] = stats.capacity;
    out["bytes"] = stats.bytes;
    out["domains"] = domains;
    return out;
}

nb::dict dump(GuardedTable& guarded) {
    const Table table(guarded);
    std::vector<std::uint32_t> ids, slot_counts, flat;
    table->each([&](std::uint32_t id, const BlockTable::Entry& entry) {
        const std::vector<std::uint32_t> own = table->slots_of(entry);
        ids.push_back(id);
        slot_counts.push_back(static_cast<std::uint32_t>(own.size()));
        flat.insert(flat.end(), own.begin(), own.end());
    });
    const std::size_t n = ids.size();
    Array<std::uint8_t> hashes = make_array<std::uint8_t>(n, kHashBytes), states = make_array<std::uint8_t>(n);
    Array<std::uint16_t> flags = make_array<std::uint16_t>(n), domains = make_array<std::uint16_t>(n);
    Array<std::uint32_t> spaces = make_array<std::uint32_t>(n), pins = make_array<std::uint32_t>(n),
                         generations = make_array<std::uint32_t>(n);
    std::size_t i = 0;
    table->each([&](std::uint32_t, const BlockTable::Entry& entry) {
        std::memcpy(hashes.data + i * kHashBytes, entry.hash, kHashBytes);
        states.data[i] = entry.state;
        flags.data[i] = entry.flags;
        domains.data[i] = entry.domain;
        spaces.data[i] = entry.space;
        pins.data[i] = entry.pins;
        generations.data[i] = entry.generation;
        ++i;
    });
    nb::dict out;
    out["entries"] = copied(ids);
    out["spaces"] = spaces;
    out["hashes"] = hashes;
    out["states"] = states;
    out["flags"] = flags;
    out["pins"] = pins;
    out["domains"] = domains;
    out["generations"] = generations;
    out["slot_counts"] = copied(slot_counts);
    out["slots"] = copied(flat);
    return out;
}

void check(GuardedTable& guarded) {
    const Table table(guarded);
    const std::string problem = table->check();
    if (problem.empty()) return;
    PyErr_SetString(PyExc_AssertionError, problem.c_str());
    throw nb::python_error();
}

}  // namespace

void register_block_table(nb::module_& module) {
    module.attr("NO_ENTRY") = kNoEntry;
    module.attr("NO_SLOT") = kNoSlot;
    module.attr("PINS_MAX") = kPinsMax;
    module.attr("CAPACITY_MAX") = kCapacityMax;

    using namespace nb::literals;
    using T = BlockTable;
    nb::class_<GuardedTable>(
        module, "BlockTable",
        "Metadata of all blocks of one tier, keyed by (space, 32-byte hash). States: 1 WRITING, 2 READY, 3 EVICTING; 0 is\n"
        "absent. An entry is the index of a block's metadata, valid until the block is removed; every method that takes\n"
        "entries refuses ones that are not live.\n\n"
        "It has one writer: a call while another runs raises RuntimeError. Every batch is checked before anything changes;\n"
        "a ValueError names argument, index and value, and leaves the table as it was. All memory is reserved when the\n"
        "table is made, and provided by the kernel when it is first used.")
        .def(nb::init<std::size_t, std::size_t, std::optional<std::uint64_t>, bool, std::size_t>(), "capacity"_a,
             "pool_pages"_a, "seed"_a = nb::none(), "ranks"_a = false, "history_blocks"_a = 0,
             "Makes a table for `capacity` blocks (1 to 2^30) in a pool of `pool_pages` pages (2 to 2^32). `seed` keys the\n"
             "index's hash function and has no visible effect. It is random by default, so that clients cannot choose\n"
             "colliding hashes. With `ranks`, victims are those that are least likely to come back soon, by what is learnt\n"
             "from asked(), and not the least recent; at least `history_blocks` that are gone are remembered for it.")
        .def_prop_ro("ranks", [](GuardedTable& guarded) { return Table(guarded)->ranks(); },
                     "Whether victims are ranked by their chance of reuse.")
        .def("rank", &rank, "history_blocks"_a,
             "Begins to rank, with nothing learnt: blocks that are there count as asked for once, the least recent first.")
        .def("stop_ranking", [](GuardedTable& guarded) { Table(guarded)->stop_ranking(); },
             "From now on the least recent goes first. What was learnt is forgotten.")
        .def("learnt", &learnt, "What was learnt of reuse, for restore_learnt(); empty if the table does not rank.")
        .def("restore_learnt", &restore_learnt, "saved"_a,
             "Goes on with what another table has learnt. Returns False, and changes nothing, if this version cannot use it.")
        .def("rank_below", &rank_below, "above"_a,
             "Begins to rank by what the table `above` learns, which ranks. Blocks that are there\n"
             "already count as asked for once, the least recent first.")
        .def("asked", &asked, "space"_a, "domain"_a, "hashes"_a, "below"_a = nb::tuple(),
             nb::sig("def asked(self, space: int, domain: int, hashes: numpy.typing.NDArray[numpy.uint8], "
                     "below: collections.abc.Sequence[BlockTable] = ()) -> None"),
             "A prompt of these blocks, from its first on, is asked for; what the tables `below` have of it counts as asked\n"
             "for there. `hashes` has shape (n, 32). Changes nothing unless the table ranks.")
        .def("asked_each", &asked_each, "entries"_a, "below"_a = nb::tuple(),
             nb::sig("def asked_each(self, entries: numpy.typing.NDArray[numpy.uint32], "
                     "below: collections.abc.Sequence[BlockTable] = ()) -> None"),
             "Each of these blocks is asked for by itself, here and in the tables `below`. Changes nothing unless the table\n"
             "ranks.")
        .def("same_as", &same_as, "entries"_a, "above"_a, "of"_a,
             "WRITING entries are the same blocks as those entries of the table `above`: what is known of their reuse, and\n"
             "what they follow, is taken over. Changes nothing unless both tables rank.")
        .def("chained", &change<&T::chained>, "entries"_a,
             "Says that these blocks follow each other in a prompt. Of those with `ranks`, none goes before its followers.")
        .def("admitted_of", &admitted_of, "domain"_a, "above"_a, "entries"_a, "free"_a,
             "The same as admitted() for entries of the table `above`.")
        .def("admitted", &admitted, "domain"_a, "entries"_a, "free"_a,
             "How many of these new blocks, in their order, are worth their room, if there is room for `free` of them: with\n"
             "`ranks` those that rank higher than what would have to go. Otherwise all.")
        .def("lookup", &lookup, "space"_a, "hashes"_a,
             nb::sig("def lookup(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8]) -> "
                     "tuple[numpy.typing.NDArray[numpy.uint32], numpy.typing.NDArray[numpy.uint8]]"),
             "Entry and state of each key; NO_ENTRY and 0 where there is none. `hashes` has shape (n, 32).")
        .def("lookup_prefix", &lookup_prefix, "space"_a, "hashes"_a,
             nb::sig("def lookup_prefix(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8]) -> "
                     "tuple[numpy.typing.NDArray[numpy.uint32], int]"),
             "Entries of the leading run of READY blocks, and the state of the block that ended it (0: absent, or all\n"
             "are READY).")
        .def("insert", &insert, "space"_a, "domain"_a, "hashes"_a, "flags"_a = 0,
             nb::sig("def insert(self, space: int, domain: int, hashes: numpy.typing.NDArray[numpy.uint8], flags: int = 0) "
                     "-> tuple[numpy.typing.NDArray[numpy.uint32], numpy.typing.NDArray[numpy.uint8]]"),
             "Creates the absent keys as WRITING, unpinned, without slots. Returns each key's entry and 1 where it was\n"
             "created, 0 where it existed or came earlier in the batch, 2 where the table was full (entry NO_ENTRY).")
        .def("attach_slots", &attach_slots, "entries"_a, "slots"_a,
             "Gives WRITING entries their slots, page numbers of shape (n, world) in shard order. The entries must have none\n"
             "yet, and the slots no owner.")
        .def("slots", &slots, "entries"_a, "world"_a,
             "Slots of the entries, uint32 of shape (n, world); a row of NO_SLOT for an entry without slots. Raises\n"
             "ValueError for an entry with another number of slots.")
        .def("owners", &owners, "slots"_a, "Entry that owns each slot; NO_ENTRY for a free one.")
        .def("commit", &change<&T::commit>, "entries"_a,
             "Makes WRITING entries READY. Unpinned ones become the most recent of their domains, the last of the batch most\n"
             "of all.")
        .def("begin_evict", &change<&T::begin_evict>, "entries"_a, "Makes READY, unpinned entries EVICTING.")
        .def("condemn", &change<&T::condemn>, "entries"_a,
             "Makes READY entries, pinned or not, EVICTING: they are not found READY any more, and whoever drops the last pin\n"
             "removes them.")
        .def("remove", &change<&T::remove>, "entries"_a,
             "Forgets unpinned WRITING or EVICTING entries and frees their slots. The entries' generations go up.")
        .def("pin", &change<&T::pin>, "entries"_a,
             "Adds a pin for each time an entry is named, up to PINS_MAX. Pinned blocks are never victims.")
        .def("unpin", &change<&T::unpin>, "entries"_a,
             "Drops a pin for each time an entry is named. A READY block that loses its last pin becomes the most recent\n"
             "of its domain, in the order of the batch.")
        .def("touch", &change<&T::touch>, "entries"_a,
             "Makes READY, unpinned blocks the most recent, in this order. Other entries stay as they are.")
        .def("cool", &change<&T::cool>, "entries"_a,
             "Makes READY, unpinned blocks the least recent of their domains, in this order, so that the last of the batch is\n"
             "the next to be evicted. Other entries stay as they are.")
        .def("victims", &victims, "domain"_a, "n"_a,
             "Up to n READY, unpinned blocks of a domain, least recent first. Changes nothing.")
        .def("coldest", &coldest, "domain"_a, "n"_a, "without_flags"_a, "horizon"_a,
             "Of the `horizon` least recent victims of a domain, up to n that have none of these flags, least recent first.\n"
             "Changes nothing.")
        .def("evictable", [](GuardedTable& guarded, std::uint16_t domain) { return Table(guarded)->evictable(domain); },
             "domain"_a, "How many blocks of a domain are READY and unpinned.")
        .def("states", &each<[](const T::Entry& entry) { return static_cast<std::uint8_t>(entry.state); }>, "entries"_a, "State of each entry.")
        .def("pins", &each<[](const T::Entry& entry) { return entry.pins; }>, "entries"_a, "Number of pins of each entry.")
        .def("flags", &each<[](const T::Entry& entry) { return static_cast<std::uint16_t>(entry.flags); }>, "entries"_a, "Flags of each entry.")
        .def("set_flags", &change_flags<&T::set_flags>, "entries"_a, "flags"_a, "Sets these bits of each entry's flags.")
        .def("clear_flags", &change_flags<&T::clear_flags>, "entries"_a, "flags"_a,
             "Clears these bits of each entry's flags.")
        .def("hashes", &hashes_of, "entries"_a, "Hash of each entry, shape (n, 32).")
        .def("spaces", &each<[](const T::Entry& entry) { return entry.space; }>, "entries"_a, "Space of each entry.")
        .def("domains", &each<[](const T::Entry& entry) { return entry.domain; }>, "entries"_a, "Eviction domain of each entry.")
        .def("generations", &each<[](const T::Entry& entry) { return entry.generation; }>, "entries"_a,
             "How many blocks have lived in each entry before this one (modulo 2^32).")
        .def("publish",
             [](GuardedTable& guarded, std::uint32_t space, std::shared_ptr<SharedIndexPage> page) {
                 Table(guarded)->publish(space, std::move(page));
             },
             "space"_a, "page"_a,
             "From now on the page has the hash of every block that is created in a space, until the block is removed. Several\n"
             "tables may share a page. Raises ValueError if the space has a page in this table.")
        .def("publish_more", [](GuardedTable& guarded, std::uint32_t space, std::size_t n) {
                 return Table(guarded)->publish_more(space, n);
             },
             "space"_a, "n"_a,
             "Looks at up to n more of the entries that the table had when the page was published, and adds those of the space.\n"
             "True once all are in the page.")
        .def("withdraw", [](GuardedTable& guarded, std::uint32_t space) { Table(guarded)->withdraw(space); }, "space"_a,
             "Stops changing a space's page.")
        .def("hold_counts", [](GuardedTable& guarded) {
                 return std::make_unique<HoldCounts>(Table(guarded)->stats().capacity);
             },
             "New counts of holders for this table's entries, all zero. Their memory is used only as entries are held.")
        .def("shadow", [](GuardedTable& guarded, std::size_t blocks) {
                 return std::make_unique<PoolShadow>(*Table(guarded), blocks);
             },
             "blocks"_a, nb::keep_alive<0, 1>(),
             "What half and twice of a pool would hit that holds this table's blocks, from a sample of at most so many blocks.\n"
             "It has the same writer as the table.")
        .def("count", [](GuardedTable& guarded, std::uint32_t space) { return Table(guarded)->count(space); }, "space"_a,
             "Number of blocks of a space, in whatever state.")
        .def("entries_of", &entries_of, "space"_a,
             "All entries of a space in ascending order. Reads the whole table, so it is not for the path of a request.")
        .def("ready_among", &ready_among, "space"_a, "first"_a, "n"_a,
             nb::sig("def ready_among(self, space: int, first: int, n: int)"
                     " -> tuple[numpy.typing.NDArray[numpy.uint32], int]"),
             "READY entries of a space among the n entries from `first` on, in ascending order; and where to go on, which is\n"
             "the capacity if no entry from there on was ever used.")
        .def("stats", &stats,
             nb::sig("def stats(self) -> dict[str, typing.Any]"),
             "The numbers `writing`, `ready`, `evicting`, `capacity` and `bytes` (of a full table, with slot records as far as\n"
             "they were used), and `domains`, the number of blocks of each domain that has any.")
        .def("dump", &dump, nb::sig("def dump(self) -> dict[str, numpy.typing.NDArray[typing.Any]]"),
             "All live entries as arrays: entries, spaces, hashes, states, flags, pins, domains, generations, slot_counts,\n"
             "and slots one after the other. For tests and validators.")
        .def("check", &check,
             "Compares every structure of the table with every other. Raises AssertionError, which says what does not fit. Slow.");
}

}  // namespace kvtier
