#include <nanobind/stl/optional.h>

#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "device_plan.hpp"
#include "gil.hpp"
#include "planes_arg.hpp"
#include "register.hpp"

namespace kvtier {

namespace {

using NumbersArg = ArrayArg<std::uint32_t>;
using Words64Arg = ArrayArg<std::uint64_t>;

// From this many fragments on, planning takes tens of microseconds.
constexpr std::size_t kReleaseFragments = 4096;

std::vector<std::uint32_t> ranges_of(const std::optional<NumbersArg>& ranges) {
    if (!ranges) return {};
    const In<std::uint32_t> in(*ranges, "ranges");
    if (in.rows() == 0) refuse("ranges has 0 elements; expected one for each of bases, or None");
    return {in.data(), in.data() + in.size()};
}

// One array for each member of the copies, in the order given.
template <class Copy, class... Members>
nb::tuple columns(const std::vector<Copy>& copies, Members... members) {
    const auto column = [&](std::uint64_t Copy::*member) {
        Array<std::uint64_t> array = make_array<std::uint64_t>(copies.size());
        for (std::size_t i = 0; i < copies.size(); ++i) array.data[i] = copies[i].*member;
        return array.object;
    };
    return nb::make_tuple(column(members)...);
}

template <class Plan>
auto planned(Plan method, const DevicePlan& plan, NumbersArg block_ids, std::uint64_t pool_address, std::uint64_t pool_bytes,
             NumbersArg slots, bool to_device, const std::optional<Words64Arg>& borders) {
    const In<std::uint32_t> ids(block_ids, "block_ids"), places(slots, "slots");
    std::optional<In<std::uint64_t>> edges;
    if (borders) edges.emplace(*borders, "borders");
    const HostSide pool{pool_address, pool_bytes, edges ? edges->span() : std::span<const std::uint64_t>()};
    const ReleaseGilIf release(ids.rows() >= kReleaseFragments || ids.rows() * plan.planes() >= kReleaseFragments);
    return (plan.*method)(ids.span(), pool, places.span(), to_device);
}

nb::tuple describe(const DevicePlan& plan, NumbersArg block_ids, std::uint64_t pool_address, std::uint64_t pool_bytes,
                   NumbersArg slots, bool to_device, const std::optional<Words64Arg>& borders) {
    return columns(
        planned(&DevicePlan::describe, plan, block_ids, pool_address, pool_bytes, slots, to_device, borders),
        &Fragment::device, &Fragment::host, &Fragment::bytes);
}

nb::tuple describe_rows(const DevicePlan& plan, NumbersArg block_ids, std::uint64_t pool_address, std::uint64_t pool_bytes,
                        NumbersArg slots, bool to_device, const std::optional<Words64Arg>& borders) {
    return columns(
        planned(&DevicePlan::describe_rows, plan, block_ids, pool_address, pool_bytes, slots, to_device, borders),
        &Rows::device, &Rows::host, &Rows::width, &Rows::rows, &Rows::device_pitch, &Rows::host_pitch);
}

#define KVTIER_DESCRIBE_PARAMETERS                                                                                    \
    "(self, block_ids: numpy.typing.NDArray[numpy.uint32], pool_address: int, pool_bytes: int, "                     \
    "slots: numpy.typing.NDArray[numpy.uint32], to_device: bool = False, "                                            \
    "borders: numpy.typing.NDArray[numpy.uint64] | None = None) -> "

}  // namespace

void register_device_plan(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<DevicePlan>(
        module, "DevicePlan",
        "Where the fragments of an engine's blocks lie in device memory, and what to copy between them and slots of the pool.\n"
        "Fragment p of block b is at bases[p] + b * block_strides[p], fragment_bytes[p] long; a slot holds a block's fragments\n"
        "one after the other. Slots are page numbers: slot s begins at byte s * PAGE_BYTES of the pool.\n\n"
        "It computes addresses and reads no memory. It is immutable and safe from several threads; large batches are planned\n"
        "without the GIL. All numbers of a call are checked first: a ValueError names argument, index and value.")
        .def(
            "__init__",
            [](DevicePlan* self, Words64Arg bases, Words64Arg block_strides, Words64Arg fragment_bytes,
               std::uint64_t num_blocks, const std::optional<NumbersArg>& ranges) {
                new (self) DevicePlan(planes_of(bases, "bases", block_strides, fragment_bytes), ranges_of(ranges), num_blocks);
            },
            "bases"_a, "block_strides"_a, "fragment_bytes"_a, "num_blocks"_a, "ranges"_a = nb::none(),
            "`bases` are device addresses; the three arrays are uint64 of shape (planes,). `ranges`, uint32 of shape (planes,),\n"
            "says in which range of device memory each plane lies: a copy never touches two ranges, however close they are.\n"
            "Without it all planes lie in one. The caller has to know that the memory exists. Raises ValueError for a base of 0,\n"
            "if an address overflows, or if a plane's blocks overlap each other.")
        .def_prop_ro("slot_bytes", [](const DevicePlan& plan) { return plan.slot_bytes(); },
                     "Bytes of one block in a slot: the sum of its fragments.")
        .def_prop_ro("num_blocks", [](const DevicePlan& plan) { return plan.num_blocks(); }, "Blocks of the engine.")
        .def_prop_ro("planes", [](const DevicePlan& plan) { return plan.planes(); }, "Fragments per block.")
        .def("describe", &describe, "block_ids"_a, "pool_address"_a, "pool_bytes"_a, "slots"_a, "to_device"_a = false,
             "borders"_a = nb::none(),
             nb::sig("def describe" KVTIER_DESCRIBE_PARAMETERS
                     "tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], "
                     "numpy.typing.NDArray[numpy.uint64]]"),
             "The copies between blocks and slots, uint32 of shape (n,) each: device addresses, host addresses and bytes, uint64\n"
             "of shape (m,). Bytes that are contiguous on both sides become one copy, whatever the order of the blocks. The order\n"
             "of the copies is not that of the blocks.\n\n"
             "With `to_device`, the device is written: no block may come twice, but a slot may. Without it, no slot may come\n"
             "twice, but a block may. Slots must not overlap in part. `borders`, uint64 of shape (k,), are offsets of the pool in\n"
             "rising order that no copy may cross, such as the ends of memory registrations. One inside a slot raises ValueError.")
        .def("describe_rows", &describe_rows, "block_ids"_a, "pool_address"_a, "pool_bytes"_a, "slots"_a,
             "to_device"_a = false, "borders"_a = nb::none(),
             nb::sig("def describe_rows" KVTIER_DESCRIBE_PARAMETERS
                     "tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], "
                     "numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], "
                     "numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64]]"),
             "The same bytes as two-dimensional copies: device and host addresses, width in bytes, rows, and the distance of two\n"
             "rows on the device and on the host, uint64 of shape (m,) each. Fragments at constant distances become one copy,\n"
             "either over the planes of a block or over the blocks of a plane, whichever gives fewer copies, and never more than\n"
             "describe() gives. A single row is a plain copy, with its width for pitches. Pitches are at most 2^31 - 1, which is\n"
             "what drivers accept.");
}

}  // namespace kvtier
