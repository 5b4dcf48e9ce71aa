// Decides when a call lets other Python threads run.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>

namespace kvtier {

// Releases the GIL for its scope if there is work for more than some tens of microseconds. For less it is not worth it,
// because a busy thread that gets the GIL keeps it for a whole switch interval, 5 ms by default.
class ReleaseGilIf {
   public:
    explicit ReleaseGilIf(bool worthwhile) {
        if (worthwhile) release_.emplace();
    }

   private:
    std::optional<nanobind::gil_scoped_release> release_;
};

// The GIL is released for batches of at least this many keys or entries; 256 cold keys take about 15 us.
constexpr std::size_t kReleaseRows = 256;

}  // namespace kvtier
