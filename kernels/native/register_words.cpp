#include "arrays.hpp"
#include "register.hpp"
#include "shared_words.hpp"

namespace kvtier {

namespace {

Array<std::uint64_t> load_many(const SharedWords& words, ArrayArg<std::uint32_t> indexes) {
    const In<std::uint32_t> input(indexes, "indexes");
    for (std::size_t i = 0; i < input.size(); ++i)
        if (input.data()[i] >= words.count())
            refuse("indexes[", i, "] is ", input.data()[i], "; there are ", words.count(), " words");
    Array<std::uint64_t> out = make_array<std::uint64_t>(input.size());
    for (std::size_t i = 0; i < input.size(); ++i) out.data[i] = words.load(input.data()[i]);
    return out;
}

}  // namespace

void register_words(nb::module_& module) {
    module.attr("PART_ARMED") = static_cast<int>(kPartArmed);
    module.attr("PART_STARTED") = static_cast<int>(kPartStarted);
    module.attr("PART_REVOKED") = static_cast<int>(kPartRevoked);
    module.attr("PART_DONE") = static_cast<int>(kPartDone);
    module.attr("PART_FAILED") = static_cast<int>(kPartFailed);
    module.attr("PART_SUPERSEDED") = static_cast<int>(kPartSuperseded);
    module.attr("TICKET_MAX") = kTicketMax;

    nb::class_<SharedWords>(
        module, "SharedWords",
        "64-bit words at the start of a writable buffer, shared with other processes. The buffer stays exported while this\n"
        "object lives, so drop it before closing an mmap. It is safe from any number of threads. An index out of range raises\n"
        "ValueError.")
        .def(nb::init<BufferArg, std::size_t>(), nb::arg("buffer"), nb::arg("count"),
             "`count` is at least one. Raises ValueError if the buffer is too small, read-only or not 8-byte aligned.")
        .def_prop_ro("count", [](const SharedWords& words) { return words.count(); }, "Number of words.")
        .def("load", &Words::load, nb::arg("index"), "The word's value (acquire).")
        .def("load_many", &load_many, nb::arg("indexes"),
             "The values of several words (acquire for each), uint64 of shape (n,) like `indexes`.")
        .def("store", &Words::store, nb::arg("index"), nb::arg("value"), "Sets the word (release).")
        .def("compare_exchange", &Words::compare_exchange, nb::arg("index"), nb::arg("expected"), nb::arg("desired"),
             "Sets the word to `desired` if it is `expected`, and returns whether it did (acquire and release).")
        .def("ring", &Words::ring, nb::arg("index"), nb::arg("value"),
             "Raises a doorbell to `value` (release). One that is as high or higher stays: doorbells never go back.")
        .def("try_start", &Words::try_start, nb::arg("index"), nb::arg("ticket"),
             "Moves a part from armed to STARTED. False, and nothing changed, if it is started, revoked, over or superseded.")
        .def("try_revoke", &Words::try_revoke, nb::arg("index"), nb::arg("ticket"),
             "Moves a part from armed to REVOKED. True as well if it is revoked already; then it will never start. False, and\n"
             "nothing changed, if it is started, over or superseded.")
        .def("finish", &Words::finish, nb::arg("index"), nb::arg("ticket"), nb::arg("state"),
             "Moves a part from STARTED to PART_DONE or PART_FAILED (release). Raises RuntimeError, and changes nothing, if the\n"
             "word does not say STARTED for this ticket.")
        .def("part_state", &Words::part_state, nb::arg("index"), nb::arg("ticket"),
             "The part's state, one of the PART_ constants; PART_SUPERSEDED if the word belongs to a later ticket. Raises\n"
             "RuntimeError for a value that no part word can have.");
}

}  // namespace kvtier
