"""Batches of three-dimensional copies (cuMemcpy3DBatchAsync of CUDA 13.0), each of one fragment.

No part of the daemon: it exists to be compared with what the daemon does.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p

import numpy as np
import numpy.typing as npt
from kvtier_kernels.cuda import abi
from kvtier_kernels.cuda.driver import Driver

U64 = npt.NDArray[np.uint64]
POINTER_OPERAND = 1


class Operand(Structure):
    """CUmemcpy3DOperand of a pointer; its other form is as large."""

    _fields_ = (
        ("type", c_int),
        ("pointer", c_uint64),
        ("row_length", c_size_t),
        ("layer_height", c_size_t),
        ("location_hint", abi.CUmemLocation),
    )


class Volume(Structure):
    """CUDA_MEMCPY3D_BATCH_OP."""

    _fields_ = (
        ("source", Operand),
        ("target", Operand),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("source_access_order", c_int),
        ("flags", c_uint),
    )


PROTOTYPE = (c_size_t, POINTER(Volume), c_ulonglong, c_void_p)


def batch_of_volumes(
    driver: Driver, target: U64, source: U64, sizes: U64, stream: int
) -> Callable[[], None] | None:
    """Returns what submits them, or None if the driver has no such batches."""
    function = driver.library.versioned("cuMemcpy3DBatchAsync", abi.VERSION_BATCH_V2, PROTOTYPE)
    if function is None:
        return None
    volumes = (Volume * len(sizes))()
    for volume, to, start, n in zip(volumes, target.tolist(), source.tolist(), sizes.tolist(), strict=True):
        for end, address in ((volume.source, start), (volume.target, to)):
            end.type, end.pointer, end.row_length, end.layer_height = POINTER_OPERAND, address, n, 1
        volume.width, volume.height, volume.depth = n, 1, 1
        volume.source_access_order = abi.SRC_ACCESS_ORDER_STREAM

    def submit() -> None:
        code = function(len(volumes), volumes, 0, stream)
        if code:
            raise driver.library.error("cuMemcpy3DBatchAsync", code)

    return submit
