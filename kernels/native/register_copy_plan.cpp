#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "copy_plan.hpp"
#include "planes_arg.hpp"
#include "register.hpp"
#include "stream_copy.hpp"

namespace kvtier {

namespace {

using NumbersArg = ArrayArg<std::uint32_t>;
using OffsetsArg = ArrayArg<std::uint64_t>;

const StreamOps& variant_of(const std::optional<std::string>& name) {
    if (!name) return *stream_variants().front();
    for (const StreamOps* ops : stream_variants())
        if (*name == ops->name) return *ops;
    refuse("variant is '", *name, "', which this machine does not have; see copy_variants()");
}

// A plan over a Python buffer, which stays exported (an mmap cannot be closed) as long as this object lives.
class BufferPlan : public CopyPlan {
   public:
    BufferPlan(BufferArg mapping, OffsetsArg base_offsets, OffsetsArg block_strides, OffsetsArg fragment_bytes,
               std::uint64_t num_blocks, const std::optional<std::string>& variant)
        : BufferPlan(std::make_unique<Buffer>(mapping.object, "mapping", true),
                     planes_of(base_offsets, "base_offsets", block_strides, fragment_bytes), num_blocks, variant_of(variant)) {}

   private:
    BufferPlan(std::unique_ptr<Buffer> buffer, std::vector<Plane> planes, std::uint64_t num_blocks,
               const StreamOps& ops)
        : CopyPlan(buffer->data(), buffer->bytes(), std::move(planes), num_blocks, ops), buffer_(std::move(buffer)) {}
    std::unique_ptr<Buffer> buffer_;
};

Pool pool_of(const Buffer& buffer) { return {buffer.data(), buffer.bytes()}; }

void gather(const BufferPlan& plan, NumbersArg block_ids, BufferArg pool, NumbersArg slots,
            std::optional<OffsetsArg> checksums) {
    const In<std::uint32_t> ids(block_ids, "block_ids");
    const Buffer memory(pool.object, "pool", true);
    const In<std::uint32_t> targets(slots, "slots");
    std::optional<In<std::uint64_t>> sums;
    if (checksums) sums.emplace(*checksums, "checksums", true).require_rows(ids.rows(), "block_ids");
    const nb::gil_scoped_release release;
    plan.gather(ids.span(), pool_of(memory), targets.span(), sums ? sums->data() : nullptr);
}

void scatter(const BufferPlan& plan, NumbersArg block_ids, BufferArg pool, NumbersArg slots) {
    const In<std::uint32_t> ids(block_ids, "block_ids");
    const Buffer memory(pool.object, "pool", false);
    const In<std::uint32_t> sources(slots, "slots");
    const nb::gil_scoped_release release;
    plan.scatter(ids.span(), pool_of(memory), sources.span());
}

std::optional<std::uint64_t> first_hole(const BufferPlan& plan, NumbersArg block_ids, int fd) {
    const In<std::uint32_t> ids(block_ids, "block_ids");
    const nb::gil_scoped_release release;
    return plan.first_hole(ids.span(), fd);
}

Array<std::uint64_t> checksums(const BufferPlan& plan, BufferArg pool, NumbersArg slots) {
    const Buffer memory(pool.object, "pool", false);
    const In<std::uint32_t> sources(slots, "slots");
    Array<std::uint64_t> out = make_array<std::uint64_t>(sources.rows());
    const nb::gil_scoped_release release;
    plan.checksums(pool_of(memory), sources.span(), out.data);
    return out;
}

}  // namespace

void register_copy_plan(nb::module_& module) {
    using namespace nb::literals;
    module.attr("PAGE_BYTES") = kPageBytes;
    module.def(
        "copy_variants",
        [] {
            nb::list names;
            for (const StreamOps* ops : stream_variants()) names.append(ops->name);
            return names;
        },
        nb::sig("def copy_variants() -> list[str]"),
        "The variants of copies that this machine can run, fastest first: avx512, avx2, sse2, memcpy.");

    nb::class_<BufferPlan>(
        module, "CopyPlan",
        "Where the fragments of an engine's blocks lie in its mapping, and the copies between them and slots of the pool.\n"
        "Fragment p of block b is at base_offsets[p] + b * block_strides[p], fragment_bytes[p] long; a slot holds a block's\n"
        "fragments one after the other. Slots are page numbers: slot s begins at byte s * PAGE_BYTES of the pool.\n\n"
        "All numbers of a call are checked before a byte is copied: a ValueError names argument, index and value, and\n"
        "nothing was written. Copies release the GIL and are safe from several threads as long as their targets do not\n"
        "overlap. When a call returns, its stores come before any later store of this thread. The mapping stays exported\n"
        "while this object lives: drop it before closing an mmap.")
        .def(nb::init<BufferArg, OffsetsArg, OffsetsArg, OffsetsArg, std::uint64_t, const std::optional<std::string>&>(), "mapping"_a, "base_offsets"_a,
             "block_strides"_a, "fragment_bytes"_a, "num_blocks"_a, "variant"_a = nb::none(),
             "`mapping` is a writable buffer; the three arrays are uint64 of shape (planes,). `variant` is one of\n"
             "copy_variants(), the first by default. Raises ValueError unless every fragment of blocks 0 to num_blocks - 1 lies\n"
             "inside the mapping and no plane's blocks overlap each other.")
        .def_prop_ro("slot_bytes", [](const BufferPlan& plan) { return plan.slot_bytes(); },
                     "Bytes of one block in a slot: the sum of its fragments.")
        .def_prop_ro("num_blocks", [](const BufferPlan& plan) { return plan.num_blocks(); }, "Blocks of the engine.")
        .def_prop_ro("planes", [](const BufferPlan& plan) { return plan.planes(); }, "Fragments per block.")
        .def("gather", &gather, "block_ids"_a, "pool"_a, "slots"_a, "checksums"_a = nb::none(),
             "Copies blocks to slots, uint32 of shape (n,) each. Slots must not overlap. `checksums`, uint64 of shape (n,),\n"
             "receives xxh3_64 of each slot's bytes, which takes half as long again, but less than reading them later.")
        .def("scatter", &scatter, "block_ids"_a, "pool"_a, "slots"_a,
             "Copies slots to blocks. A block may come only once, and a slot several times.")
        .def("first_hole", &first_hole, "block_ids"_a, "fd"_a,
             "The offset of the first page of the blocks for which the file `fd`, whose beginning is the mapping, has no data;\n"
             "None if it has data everywhere. A page that was reserved and never written has none. Any file that is not a\n"
             "plain memfd is taken to have none. Moves the file offset of `fd`.")
        .def("checksums", &checksums, "pool"_a, "slots"_a, "xxh3_64 of each slot's bytes, uint64 of shape (n,).");
}

}  // namespace kvtier
