// An index page over a Python buffer.
#pragma once

#include <memory>
#include <utility>

#include "arrays.hpp"
#include "index_page.hpp"

namespace kvtier {

// The buffer stays exported (an mmap cannot be closed) as long as this object lives.
class SharedIndexPage : public IndexPage {
   public:
    SharedIndexPage(BufferArg buffer, std::uint64_t boot_nonce, std::uint64_t seed)
        : SharedIndexPage(std::make_unique<Buffer>(buffer.object, "buffer", true), boot_nonce, seed) {}

   private:
    SharedIndexPage(std::unique_ptr<Buffer> buffer, std::uint64_t boot_nonce, std::uint64_t seed)
        : IndexPage(buffer->data(), buffer->bytes(), boot_nonce, seed), buffer_(std::move(buffer)) {}
    std::unique_ptr<Buffer> buffer_;
};

}  // namespace kvtier
