// Refusals: exceptions whose text names the argument, the index and the value. nanobind turns std::invalid_argument into
// ValueError and std::runtime_error into RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace kvtier {

template <class... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

// Throws std::invalid_argument (ValueError) with the joined parts.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
    throw std::invalid_argument(text(parts...));
}

}  // namespace kvtier
