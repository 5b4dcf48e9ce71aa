// An array of zeros with a fixed size, whose pages the kernel provides when they are first touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace kvtier {

template <class T>
class LazyArray {
    static_assert(std::is_trivially_copyable_v<T>, "the memory starts as zeros and is never constructed");

   public:
    // `huge` asks for huge pages, for arrays that are read at random places, where each access would miss the TLB.
    LazyArray(std::size_t size, bool huge) : size_(size), bytes_(size * sizeof(T)) {
        void* memory =
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T*>(memory);
        // This is only advice: without huge pages everything works, but more slowly.
        if (huge) (void)madvise(memory, bytes_, MADV_HUGEPAGE);
    }
    // The other one is left without elements.
    LazyArray(LazyArray&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}
    LazyArray& operator=(LazyArray&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~LazyArray() {
        if (data_ != nullptr) munmap(data_, bytes_);
    }

    T& operator[](std::size_t i) { return data_[i]; }
    const T& operator[](std::size_t i) const { return data_[i]; }
    std::size_t size() const { return size_; }
    std::size_t bytes() const { return bytes_; }

   private:
    T* data_;
    std::size_t size_;
    std::size_t bytes_;
};

}  // namespace kvtier
