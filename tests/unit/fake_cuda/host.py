"""Host memory of this process."""

import mmap
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tests.unit.fake_cuda.raw import Raw

BYTES = 1 << 20


class Host:
    """Anonymous pages, registered unless told otherwise."""

    alive: ClassVar[list["Host"]] = []
    """Streams may touch them until the fake is closed, which is after the test."""

    def __init__(self, raw: Raw, size: int = BYTES, register: bool = True) -> None:
        self._map = mmap.mmap(-1, size)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = self.array.ctypes.data
        self.alive.append(self)
        if register:
            raw.register(self.address, size)

    def random(self, seed: int) -> npt.NDArray[np.uint8]:
        """New content; a copy of it is returned."""
        self.array[:] = np.random.default_rng(seed).integers(0, 256, len(self.array), dtype=np.uint8)
        return self.array.copy()
