"""A process that copies by a kernel, as a daemon would that did not use DMA. Needs torch and Triton."""

from __future__ import annotations

from typing import Any

from tests.gpu.parts.child import Handler
from tests.gpu.parts.kernel_regions import KernelRegions


def handlers() -> dict[str, Handler]:
    regions: list[KernelRegions] = []

    def open_(fields: dict[str, Any], fds: list[int]) -> None:
        regions.append(KernelRegions(fields["region_bytes"], fields["directions"], fields["fragment_bytes"]))

    def start(fields: dict[str, Any], fds: list[int]) -> None:
        regions[0].start(fields["directions"])

    def stop(fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        return {"gb_per_s": regions[0].stop()}

    return {"open": open_, "start": start, "stop": stop}
