// Planes as Python passes them: three arrays of the same length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arrays.hpp"
#include "block_planes.hpp"

namespace kvtier {

inline std::vector<Plane> planes_of(ArrayArg<std::uint64_t> bases_arg, const char* bases_name,
                                    ArrayArg<std::uint64_t> block_strides, ArrayArg<std::uint64_t> fragment_bytes) {
    const In<std::uint64_t> bases(bases_arg, bases_name);
    const In<std::uint64_t> strides(block_strides, "block_strides");
    const In<std::uint64_t> bytes(fragment_bytes, "fragment_bytes");
    strides.require_rows(bases.rows(), bases_name);
    bytes.require_rows(bases.rows(), bases_name);
    std::vector<Plane> planes;
    planes.reserve(bases.rows());
    for (std::size_t p = 0; p < bases.rows(); ++p)
        planes.push_back({bases.data()[p], strides.data()[p], bytes.data()[p]});
    return planes;
}

}  // namespace kvtier
