#include "arrays.hpp"
#include "register.hpp"
#include "shadow.hpp"

namespace kvtier {

namespace {

using HashesArg = ArrayArg<std::uint8_t>;

class Hashes : public In<std::uint8_t, 2> {
   public:
    explicit Hashes(HashesArg arg) : In(arg, "hashes") { require_columns(kHashBytes); }
};

void asked(PoolShadow& shadow, std::uint32_t space, HashesArg hashes_arg, std::uint64_t block_bytes, std::size_t hits) {
    const Hashes hashes(hashes_arg);
    if (hits > hashes.rows()) refuse("hits is ", hits, "; expected 0 to ", hashes.rows());
    shadow.asked(space, hashes.span(), block_bytes, hits);
}

void stored(PoolShadow& shadow, std::uint32_t space, HashesArg hashes_arg, std::uint64_t block_bytes) {
    const Hashes hashes(hashes_arg);
    shadow.stored(space, hashes.span(), block_bytes);
}

nb::dict stats(const PoolShadow& shadow) {
    const PoolShadow::Figures found = shadow.figures();
    nb::dict out;
    out["asked"] = found.asked;
    out["hit"] = found.hit;
    out["missed_half"] = found.missed[0];
    out["missed_now"] = found.missed[1];
    out["missed_twice"] = found.missed[2];
    out["sampled"] = found.sampled;
    out["share"] = found.share;
    out["blocks"] = found.blocks;
    out["bytes"] = found.bytes;
    return out;
}

}  // namespace

void register_shadow(nb::module_& module) {
    using namespace nb::literals;
    using S = PoolShadow;
    nb::class_<S>(module, "PoolShadow",
                  "What a pool would hit if it had half or twice its size, and as it is, under the policy by which its block table\n"
                  "goes; made by `BlockTable.shadow`. It follows a sample of the blocks, which gets smaller where blocks are more\n"
                  "than it can follow. `hashes` have shape (n, 32). It has one writer, the table's.")
        .def("begin", &S::begin, "capacity_bytes"_a, "skipped_bytes"_a,
             "Begins anew for a pool of so many bytes. What is asked for is not counted until blocks of `skipped_bytes` were:\n"
             "so long the pool may have blocks that this has not seen.")
        .def("resize", &S::resize, "capacity_bytes"_a,
             "The pool has so many bytes from now on. What was counted is forgotten.")
        .def("asked", &asked, "space"_a, "hashes"_a, "block_bytes"_a, "hits"_a,
             nb::sig("def asked(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8], block_bytes: int, hits: int) -> None"),
             "A prompt of these blocks, each of which takes `block_bytes` of the pool, was asked for, from its first block on, and\n"
             "the pool had the first `hits`. Comes after `BlockTable.asked` of the same prompt.")
        .def("stored", &stored, "space"_a, "hashes"_a, "block_bytes"_a,
             nb::sig("def stored(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8], block_bytes: int) -> None"),
             "Blocks of one prompt, which follow each other in it, are about to be stored. Comes before `BlockTable.insert`.")
        .def("spared", &S::spared, "blocks"_a, "block_bytes"_a,
             "So many blocks were asked for without a message, because clients knew that the pool did not have them.")
        .def("fade", &S::fade, "kept"_a, "From now on, what was counted before weighs only so much of what it did.")
        .def("stats", &stats, nb::sig("def stats(self) -> dict[str, float]"),
             "How many blocks were `asked` for, how many of them the pool has `hit`, and what half of it, the pool as it is, and\n"
             "twice of it would have missed by the sample: `missed_half`, `missed_now`, `missed_twice`. Of those asked for,\n"
             "`sampled` were in the sample, to which the `share` of all blocks belongs now. It follows so many `blocks` for one\n"
             "size at most, and takes `bytes`.");
}

}  // namespace kvtier
