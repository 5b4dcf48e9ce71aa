// Arrays between Python and C++: arguments come through the buffer protocol, results are new numpy arrays.
//
// nanobind's own ndarray reports a wrong dtype as "incompatible function arguments"; here the message names the argument.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "refuse.hpp"

namespace kvtier {

namespace nb = nanobind;

// A function's parameter of this type accepts any object; In<T> or Buffer then checks it. The type is for the stub.
template <class T>
struct ArrayArg {
    nb::handle object;
};
struct BufferArg {
    nb::handle object;
};

// A C-contiguous buffer of any element type, held as long as this object lives. Make and destroy it with the GIL held.
class Buffer {
   public:
    // Throws ValueError naming `name` when the object has no C-contiguous (and, if asked for, writable) buffer.
    Buffer(nb::handle object, const char* name, bool writable);
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }
    const Py_buffer& view() const { return view_; }
    const char* name() const { return name_; }

   private:
    Py_buffer view_{};
    const char* name_;
};

// Throws ValueError unless the buffer holds unsigned integers of this size, has `dims` dimensions and is aligned.
void check_elements(const Buffer& buffer, std::size_t element_bytes, int dims);

// A C-contiguous array of unsigned integers T with `Dims` dimensions.
template <class T, int Dims = 1>
class In {
   public:
    In(ArrayArg<T> arg, const char* name, bool writable = false) : buffer_(arg.object, name, writable) {
        check_elements(buffer_, sizeof(T), Dims);
    }

    T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
    std::size_t size() const { return buffer_.bytes() / sizeof(T); }
    std::size_t rows() const { return static_cast<std::size_t>(buffer_.view().shape[0]); }
    std::size_t columns() const { return static_cast<std::size_t>(buffer_.view().shape[Dims - 1]); }
    std::span<const T> span() const { return {data(), size()}; }

    // Throws ValueError unless there are exactly `expected` rows, as many as `like` has.
    const In& require_rows(std::size_t expected, const char* like) const {
        if (rows() != expected)
            refuse(buffer_.name(), " has ", rows(), " rows; expected ", expected, ", one for each of ", like);
        return *this;
    }
    const In& require_columns(std::size_t expected) const {
        if (columns() != expected) refuse(buffer_.name(), " has rows of ", columns(), " elements; expected ", expected);
        return *this;
    }

   private:
    Buffer buffer_;
};

// A new numpy array of T; the memory is not initialised.
template <class T>
struct Array {
    nb::object object;
    T* data = nullptr;
};

// The element types that new arrays have.
enum class Element { uint8, uint16, uint32, uint64, int32 };
template <class T>
inline constexpr Element element_of = sizeof(T) == 1   ? Element::uint8
                                      : sizeof(T) == 2 ? Element::uint16
                                      : sizeof(T) == 4 ? Element::uint32
                                                       : Element::uint64;
template <>
inline constexpr Element element_of<std::int32_t> = Element::int32;

// Makes a numpy array with shape (rows,) or, if columns >= 0, (rows, columns).
nb::object new_array(Element element, std::size_t rows, std::ptrdiff_t columns, void** data);

template <class T>
Array<T> make_array(std::size_t rows) {
    Array<T> out;
    void* data = nullptr;
    out.object = new_array(element_of<T>, rows, -1, &data);
    out.data = static_cast<T*>(data);
    return out;
}

template <class T>
Array<T> make_array(std::size_t rows, std::size_t columns) {
    Array<T> out;
    void* data = nullptr;
    out.object = new_array(element_of<T>, rows, static_cast<std::ptrdiff_t>(columns), &data);
    out.data = static_cast<T*>(data);
    return out;
}

}  // namespace kvtier

namespace nanobind::detail {

template <class T>
constexpr auto array_name() {
    if constexpr (std::is_same_v<T, std::int32_t>)
        return const_name("numpy.typing.NDArray[numpy.int32]");
    else if constexpr (sizeof(T) == 1)
        return const_name("numpy.typing.NDArray[numpy.uint8]");
    else if constexpr (sizeof(T) == 2)
        return const_name("numpy.typing.NDArray[numpy.uint16]");
    else if constexpr (sizeof(T) == 4)
        return const_name("numpy.typing.NDArray[numpy.uint32]");
    else
        return const_name("numpy.typing.NDArray[numpy.uint64]");
}

template <class T>
struct type_caster<kvtier::ArrayArg<T>> {
    NB_TYPE_CASTER(kvtier::ArrayArg<T>, array_name<T>())
    bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
        value.object = source;
        return true;
    }
};

// Type checkers know only from Python 3.12 on that an array is a Buffer.
template <>
struct type_caster<kvtier::BufferArg> {
    NB_TYPE_CASTER(kvtier::BufferArg, const_name("typing_extensions.Buffer | numpy.typing.NDArray[typing.Any]"))
    bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept {
        value.object = source;
        return true;
    }
};

template <class T>
struct type_caster<kvtier::Array<T>> {
    NB_TYPE_CASTER(kvtier::Array<T>, array_name<T>())
    static handle from_cpp(const kvtier::Array<T>& array, rv_policy, cleanup_list*) noexcept {
        return nanobind::object(array.object).release();
    }
};

}  // namespace nanobind::detail
