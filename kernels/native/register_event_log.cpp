#include <nanobind/stl/optional.h>

#include <cstring>
#include <optional>

#include "arrays.hpp"
#include "event_log.hpp"
#include "register.hpp"

namespace kvtier {

namespace {

using HashesArg = ArrayArg<std::uint8_t>;

void init(EventLog* self, std::size_t bytes_max, nb::bytes secret) {
    EventLog::Secret words;
    if (secret.size() != sizeof(words)) refuse("secret has ", secret.size(), " bytes; expected ", sizeof(words));
    std::memcpy(words.data(), secret.c_str(), sizeof(words));
    new (self) EventLog(bytes_max, words);
}

bool add(EventLog& log, std::uint64_t kind, std::uint64_t time_us, std::uint64_t place, std::uint64_t hits, std::uint64_t part,
         HashesArg hashes_arg, std::optional<HashesArg> behind) {
    const In<std::uint8_t, 2> hashes(hashes_arg, "hashes");
    hashes.require_columns(kHashBytes);
    const EventLog::Event event{kind, time_us, place, 0, hits, part};
    if (!behind) return log.add(event, {}, hashes.span());
    const In<std::uint8_t, 2> before(*behind, "behind");
    before.require_columns(kHashBytes);
    return log.add(event, before.span(), hashes.span());
}

nb::tuple take(EventLog& log, std::size_t bytes_max) {
    static_assert(sizeof(EventLog::Event) == 6 * sizeof(std::uint64_t));
    const EventLog::First first = log.first(bytes_max);
    nb::tuple taken = nb::make_tuple(nb::bytes(first.events.data(), first.events.size_bytes()),
                                     nb::bytes(first.mixed.data(), first.mixed.size_bytes()));
    log.remove(first);
    return taken;
}

}  // namespace

void register_event_log(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<EventLog>(module, "EventLog",
                         "What engines look up and store, until it is taken: events, and of each block hash eight bytes, which are\n"
                         "mixed from all 32 with a `secret` of 32 random bytes. It has one writer, and takes no more than about\n"
                         "twice `bytes_max` of memory.")
        .def("__init__", &init, "bytes_max"_a, "secret"_a)
        .def("add", &add, "kind"_a, "time_us"_a, "place"_a, "hits"_a, "part"_a, "hashes"_a, "behind"_a = nb::none(),
             nb::sig("def add(self, kind: int, time_us: int, place: int, hits: int, part: int, hashes: "
                     "numpy.typing.NDArray[numpy.uint8], behind: numpy.typing.NDArray[numpy.uint8] | None = None) -> bool"),
             "Adds an event of these `hashes`, shape (n, 32), which come behind those of `behind`, if that is given. Returns\n"
             "whether there was room for it.")
        .def_prop_ro("size_bytes", &EventLog::bytes, "What the events take that are there.")
        .def_static("bytes_of", &EventLog::bytes_of, "hashes"_a, "What an event of so many hashes takes.")
        .def("take", &take, "bytes_max"_a, nb::sig("def take(self, bytes_max: int) -> tuple[bytes, bytes]"),
             "Takes the first events: as many as have `bytes_max` bytes with their hashes, but one at least. Returns six numbers\n"
             "of eight bytes for each (kind, time, place, number of hashes, hits, part), and eight bytes for each hash.");
}

}  // namespace kvtier
