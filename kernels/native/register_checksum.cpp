#include "arrays.hpp"
#include "checksum.hpp"
#include "register.hpp"

namespace kvtier {

void register_checksum(nb::module_& module) {
    module.def(
        "xxh3_64",
        [](BufferArg data) {
            const Buffer buffer(data.object, "data", false);
            nb::gil_scoped_release release;
            return xxh3_64(buffer.data(), buffer.bytes());
        },
        nb::arg("data"),
        "The 64-bit XXH3 checksum of a C-contiguous buffer's bytes. Raises ValueError for anything else.");
    module.def(
        "xxh3_64_rows",
        [](ArrayArg<std::uint8_t> rows) {
            const In<std::uint8_t, 2> input(rows, "rows");
            Array<std::uint64_t> out = make_array<std::uint64_t>(input.rows());
            {
                nb::gil_scoped_release release;
                for (std::size_t row = 0; row < input.rows(); ++row)
                    out.data[row] = xxh3_64(input.data() + row * input.columns(), input.columns());
            }
            return out;
        },
        nb::arg("rows"), "The checksum of each row of a uint8 array of shape (n, bytes), as uint64 of shape (n,).");
}

}  // namespace kvtier
