"""A process that opens another one's memory, as a copy worker does, and says what the driver answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvtier_kernels.cuda import CudaError

from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import take_device


class Importer:
    """Answers `legacy` (a handle) and `chunk` (a descriptor) with "ok", or the driver's error."""

    def __init__(self) -> None:
        self._driver = take_device().driver

    def legacy(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        return answer(lambda: self._driver.ipc_open(bytes.fromhex(fields["handle"])))

    def chunk(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        said = answer(lambda: self._driver.chunk_import(fds[0]))
        os.close(fds[0])
        return said


def answer(call: Callable[[], object]) -> dict[str, Any]:
    try:
        call()
    except CudaError as error:
        return {"said": f"{error.name} ({error.code})"}
    return {"said": "ok"}


def handlers() -> dict[str, Handler]:
    importer = Importer()
    return {"legacy": importer.legacy, "chunk": importer.chunk}
