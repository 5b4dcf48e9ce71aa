// Words over a Python buffer.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "arrays.hpp"
#include "words.hpp"

namespace kvtier {

// The buffer stays exported (an mmap cannot be closed) as long as this object lives.
class SharedWords : public Words {
   public:
    SharedWords(BufferArg buffer, std::size_t count)
        : SharedWords(std::make_unique<Buffer>(buffer.object, "buffer", true), count) {}

   private:
    SharedWords(std::unique_ptr<Buffer> buffer, std::size_t count)
        : Words(buffer->data(), buffer->bytes(), count), buffer_(std::move(buffer)) {}
    std::unique_ptr<Buffer> buffer_;
};

}  // namespace kvtier
