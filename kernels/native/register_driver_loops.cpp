#include "arrays.hpp"
#include "driver_loops.hpp"
#include "register.hpp"

namespace kvtier {

namespace {

using Words64Arg = ArrayArg<std::uint64_t>;
using Words64In = In<std::uint64_t>;

template <class Function>
Function function_at(std::uint64_t address) {
    if (address == 0) refuse("function_address is 0: there is no function");
    return reinterpret_cast<Function>(address);
}

nb::tuple as_tuple(const LoopResult& result) { return nb::make_tuple(result.code, result.done); }

nb::tuple run_copy_loop(std::uint64_t function_address, Words64Arg dst, Words64Arg src, Words64Arg sizes,
                        std::uint64_t stream) {
    const auto function = function_at<CopyFunction>(function_address);
    const Words64In targets(dst, "dst"), sources(src, "src"), bytes(sizes, "sizes");
    sources.require_rows(targets.rows(), "dst");
    bytes.require_rows(targets.rows(), "dst");
    LoopResult result{};
    {
        const nb::gil_scoped_release release;
        result = copy_loop(function, targets.span(), sources.span(), bytes.span(), reinterpret_cast<void*>(stream));
    }
    return as_tuple(result);
}

nb::tuple run_copy_rows_loop(std::uint64_t function_address, Words64Arg device, Words64Arg host, Words64Arg width,
                             Words64Arg rows, Words64Arg device_pitch, Words64Arg host_pitch, bool to_device,
                             std::uint64_t stream) {
    const auto function = function_at<Copy2DFunction>(function_address);
    const Words64In devices(device, "device"), hosts(host, "host"), widths(width, "width"), heights(rows, "rows"),
        device_pitches(device_pitch, "device_pitch"), host_pitches(host_pitch, "host_pitch");
    for (const Words64In* array : {&hosts, &widths, &heights, &device_pitches, &host_pitches})
        array->require_rows(devices.rows(), "device");
    LoopResult result{};
    {
        const nb::gil_scoped_release release;
        result = copy_rows_loop(function,
                                {devices.span(), hosts.span(), widths.span(), heights.span(), device_pitches.span(),
                                 host_pitches.span()},
                                to_device, reinterpret_cast<void*>(stream));
    }
    return as_tuple(result);
}

}  // namespace

void register_driver_loops(nb::module_& module) {
    using namespace nb::literals;
    module.def(
        "copy_loop", &run_copy_loop, "function_address"_a, "dst"_a, "src"_a, "sizes"_a, "stream"_a,
        nb::sig("def copy_loop(function_address: int, dst: numpy.typing.NDArray[numpy.uint64], "
                "src: numpy.typing.NDArray[numpy.uint64], sizes: numpy.typing.NDArray[numpy.uint64], stream: int) "
                "-> tuple[int, int]"),
        "Calls `CUresult f(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)`, which lies at that address\n"
        "(cuMemcpyAsync), once for each element of the arrays, uint64 of shape (n,), in order and without the GIL. Returns\n"
        "(0, n), or (code, i) for the first call i that did not return 0; the copies before it are submitted. Addresses and\n"
        "sizes are the caller's responsibility. Raises ValueError, with nothing called, for arrays of different lengths.");
    module.def(
        "copy_rows_loop", &run_copy_rows_loop, "function_address"_a, "device"_a, "host"_a, "width"_a, "rows"_a,
        "device_pitch"_a, "host_pitch"_a, "to_device"_a, "stream"_a,
        nb::sig("def copy_rows_loop(function_address: int, device: numpy.typing.NDArray[numpy.uint64], "
                "host: numpy.typing.NDArray[numpy.uint64], width: numpy.typing.NDArray[numpy.uint64], "
                "rows: numpy.typing.NDArray[numpy.uint64], device_pitch: numpy.typing.NDArray[numpy.uint64], "
                "host_pitch: numpy.typing.NDArray[numpy.uint64], to_device: bool, stream: int) -> tuple[int, int]"),
        "As copy_loop, with cuMemcpy2DAsync_v2 and the arrays that DevicePlan.describe_rows() returns, from host to device\n"
        "memory or back.");
}

}  // namespace kvtier
