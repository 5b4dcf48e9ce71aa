"""The loaded driver library: it resolves and types symbols, and turns results into exceptions."""

import ctypes
import os
from collections.abc import Callable
from ctypes import CDLL, CFUNCTYPE, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, Final

from kvtier_kernels.cuda import abi, errors

PATH_VARIABLE: Final = "KVTIER_CUDA_LIBRARY"
PATH_DEFAULT: Final = "libcuda.so.1"

_OPTIONAL: Final = frozenset({"cuDeviceGetUuid"})
"""Superseded functions, which a future driver may leave out."""


def library_path(path: str | None = None) -> str:
    """`path`, or else what KVTIER_CUDA_LIBRARY says, or else the name by which the loader finds the installed
    driver."""
    return path or os.environ.get(PATH_VARIABLE) or PATH_DEFAULT


class Library:
    """One library that is loaded, initialised (cuInit), and of a version that the binding knows.

    Every call releases the GIL while it runs, and may be made from any thread. Raises CudaUnavailableError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._dll = _open(path)
        self._functions: dict[str, Callable[..., int]] = {}
        for name in ("cuDriverGetVersion", "cuGetErrorName", "cuInit"):
            self._functions[name] = self._symbol(name)
        self.version = self._read_version()
        if self.version < abi.VERSION_MIN:
            raise errors.CudaUnavailableError(
                f"the NVIDIA driver behind {path} supports CUDA {version_text(self.version)}; kvtier needs a "
                f"driver for CUDA {version_text(abi.VERSION_MIN)} or later (525 or later): update the driver"
            )
        self._init()
        for name in abi.PROTOTYPES:
            if name not in self._functions and (name not in _OPTIONAL or hasattr(self._dll, name)):
                self._functions[name] = self._symbol(name)

    @property
    def file(self) -> str:
        """The file that the loader found for `path`, with links followed. Its name has the driver's
        release."""
        return _file_mapped_at(self.address("cuInit")) or self.path

    def has(self, name: str) -> bool:
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> None:
        """Calls `name`; raises CudaError unless it succeeds."""
        code = self._functions[name](*arguments)
        if code != errors.SUCCESS:
            raise self.error(name, code, arguments)

    def result(self, name: str, *arguments: Any) -> int:
        """Calls `name` and returns its code, for calls where more than one code is an answer."""
        return self._functions[name](*arguments)

    def error(
        self, name: str, code: int, arguments: tuple[Any, ...] = (), more: str = ""
    ) -> errors.CudaError:
        text = ", ".join(_argument_text(argument) for argument in arguments) + more
        sticky = (
            self._is_context_lost()
            if code == errors.UNKNOWN and name in errors.ANSWERS_UNKNOWN_TO_BAD_INPUT
            else None
        )
        return errors.CudaError(name, code, self.error_name(code), text, sticky)

    def _is_context_lost(self) -> bool:
        # If the context is lost, every call that needs it fails like this one.
        return self.result("cuMemGetInfo_v2", byref(c_size_t()), byref(c_size_t())) in errors.STICKY_CODES

    def error_name(self, code: int) -> str:
        name = c_char_p()
        if self._functions["cuGetErrorName"](code, byref(name)) != errors.SUCCESS or not name.value:
            return "an error this driver has no name for"
        return name.value.decode("ascii", "replace")

    def address(self, name: str) -> int:
        """The address of an exported function, for native code that calls it."""
        return ctypes.cast(self._dll[name], c_void_p).value or 0

    def versioned(self, name: str, version: int, prototype: tuple[Any, ...]) -> Callable[..., int] | None:
        """The form that function `name` (without suffix) had in CUDA `version`; None if there is none.

        For a version above the driver's own, cuGetProcAddress returns the newest form that it has, whose
        parameters may be different. So the driver's version is checked first.
        """
        if self.version < version:
            return None
        found, status = c_void_p(), c_int()
        code = self.result(
            "cuGetProcAddress_v2",
            name.encode("ascii"),
            byref(found),
            version,
            abi.GET_PROC_ADDRESS_DEFAULT,
            byref(status),
        )
        if code in errors.STICKY_CODES:
            arguments = (c_char_p(name.encode("ascii")), byref(found), version)
            raise self.error("cuGetProcAddress_v2", code, arguments)
        if code != errors.SUCCESS or status.value != abi.PROC_ADDRESS_FOUND or not found.value:
            return None
        return CFUNCTYPE(c_int, *prototype)(found.value)

    def _symbol(self, name: str) -> Callable[..., int]:
        try:
            function = self._dll[name]
        except AttributeError:
            raise errors.CudaUnavailableError(
                f"{self.path} has no function {name}: it is no NVIDIA driver for CUDA "
                f"{version_text(abi.VERSION_MIN)} or later; set {PATH_VARIABLE} to the driver's libcuda.so.1"
            ) from None
        function.argtypes = abi.PROTOTYPES[name]
        function.restype = c_int
        return function

    def _read_version(self) -> int:
        version = c_int()
        code = self.result("cuDriverGetVersion", byref(version))
        if code != errors.SUCCESS:
            raise self._unusable("cuDriverGetVersion", code)
        return version.value

    def _init(self) -> None:
        code = self.result("cuInit", 0)
        if code != errors.SUCCESS:
            raise self._unusable("cuInit", code)

    def _unusable(self, name: str, code: int) -> errors.CudaUnavailableError:
        return errors.CudaUnavailableError(
            f"{name} of {self.path} failed: {self.error_name(code)} ({code}); {errors.init_advice(code)}",
            code,
        )


def version_text(version: int) -> str:
    """12080 is "12.8"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _open(path: str) -> CDLL:
    try:
        return CDLL(path)
    except OSError as error:
        raise errors.CudaUnavailableError(
            f"cannot load the CUDA driver library {path!r} ({error}): install the NVIDIA driver (525 or "
            "later); in a container let the NVIDIA container toolkit mount it; "
            f"or set {PATH_VARIABLE} to where it is"
        ) from error


def _file_mapped_at(address: int) -> str | None:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            first, last = (int(text, 16) for text in line.split(maxsplit=1)[0].split("-"))
            if first <= address < last:
                # Five fields and the path, which may hold spaces.
                return line.split(maxsplit=5)[5].strip()
    return None


def _argument_text(argument: Any) -> str:
    """Numbers as they are, addresses in hexadecimal, and arguments that only receive a result as "…"."""
    if isinstance(argument, int):
        return hex(argument) if argument >= 1 << 40 else str(argument)
    if isinstance(argument, c_int):
        return str(argument.value)
    if isinstance(argument, c_char_p) and argument.value is not None:
        return argument.value.decode("ascii", "replace")
    return "…"
