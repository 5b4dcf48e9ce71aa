#include "arrays.hpp"

#include <cstring>

namespace kvtier {

Buffer::Buffer(nb::handle object, const char* name, bool writable) : name_(name) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
        PyErr_Clear();
        refuse(name, " of type ", Py_TYPE(object.ptr())->tp_name, " is not a C-contiguous ",
               writable ? "writable " : "", "buffer or array");
    }
}

namespace {

// The buffer protocol's letter for an unsigned integer, or 0 when the format is anything else.
char unsigned_letter(const char* format) {
    if (format == nullptr) return 'B';
    if (*format == '@' || *format == '=' || (*format == '<' && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)) ++format;
    return format[0] != 0 && format[1] == 0 && std::strchr("BHILQ", format[0]) != nullptr ? format[0] : '\0';
}

}  // namespace

void check_elements(const Buffer& buffer, std::size_t element_bytes, int dims) {
    const Py_buffer& view = buffer.view();
    if (unsigned_letter(view.format) == 0 || static_cast<std::size_t>(view.itemsize) != element_bytes)
        refuse(buffer.name(), " has elements of format '", view.format == nullptr ? "B" : view.format, "' and ",
               view.itemsize, " bytes; expected uint", element_bytes * 8);
    if (view.ndim != dims) refuse(buffer.name(), " has ", view.ndim, " dimensions; expected ", dims);
    if (reinterpret_cast<std::uintptr_t>(view.buf) % element_bytes != 0)
        refuse(buffer.name(), " is not aligned to its elements of ", element_bytes, " bytes");
}

nb::object new_array(Element element, std::size_t rows, std::ptrdiff_t columns, void** data) {
    // These are kept as long as the process lives, because every lookup makes a result array and must not import anything.
    static PyObject* const empty = nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
    static PyObject* const types = [] {
        nb::object numpy = nb::module_::import_("numpy");
        nb::object dtype = numpy.attr("dtype");
        return nb::make_tuple(dtype("uint8"), dtype("uint16"), dtype("uint32"), dtype("uint64"), dtype("int32")).release().ptr();
    }();
    nb::object shape =
        columns < 0 ? nb::object(nb::int_(rows)) : nb::object(nb::make_tuple(rows, static_cast<std::size_t>(columns)));
    PyObject* arguments[] = {shape.ptr(), PyTuple_GET_ITEM(types, static_cast<Py_ssize_t>(element))};
    nb::object array = nb::steal(PyObject_Vectorcall(empty, arguments, 2, nullptr));
    if (!array.is_valid()) throw nb::python_error();
    Py_buffer view;
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) throw nb::python_error();
    *data = view.buf;
    PyBuffer_Release(&view);  // the array owns its memory and never moves it
    return array;
}

}  // namespace kvtier
