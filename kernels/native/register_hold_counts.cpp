#include "arrays.hpp"
#include "hold_counts.hpp"
#include "register.hpp"

namespace kvtier {

namespace {

using EntriesArg = ArrayArg<std::uint32_t>;

std::size_t add(HoldCounts& counts, EntriesArg entries) { return counts.add(In<std::uint32_t>(entries, "entries").span()); }

std::size_t remove(HoldCounts& counts, EntriesArg entries) {
    return counts.remove(In<std::uint32_t>(entries, "entries").span());
}

Array<std::uint32_t> of(const HoldCounts& counts, EntriesArg entries_arg) {
    const In<std::uint32_t> entries(entries_arg, "entries");
    counts.check(entries.span());
    Array<std::uint32_t> found = make_array<std::uint32_t>(entries.rows());
    for (std::size_t i = 0; i < entries.rows(); ++i) found.data[i] = counts[entries.data()[i]];
    return found;
}

}  // namespace

void register_hold_counts(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<HoldCounts>(module, "HoldCounts",
                           "How many holders each entry of a BlockTable has; made by `BlockTable.hold_counts`. It has one\n"
                           "writer. An entry out of range raises ValueError, and then nothing has changed.")
        .def("add", &add, "entries"_a,
             "Counts one more holder for each occurrence of an entry. Returns how many entries had none before.")
        .def("remove", &remove, "entries"_a,
             "Undoes an `add` of the same entries. Returns how many entries have none now. Raises ValueError for an entry that\n"
             "nobody holds, and then nothing has changed.")
        .def("of", &of, "entries"_a, "How many holders each entry has.");
}

}  // namespace kvtier
