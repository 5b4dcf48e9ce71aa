"""An engine: computes step after step and says how long they took; can copy by a kernel of its own meanwhile.

Uses torch where there is a GPU for it; on the fake driver a sum in numpy stands in.
"""

from __future__ import annotations

from typing import Any

from tests.gpu.parts.child import Handler
from tests.gpu.parts.workloads import DECODE, GEMM, NumpySum, TorchDecode, TorchGemm, Workload, measure


class Engine:
    """Answers `open`, `measure`, and `open_kernels`, `start`, `stop` for copies inside the engine's
    process."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}
        self._regions: Any = None

    def open(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Makes the workloads on "cuda", "cpu" (torch, tiny) or "none" (no torch)."""
        where = fields["where"]
        if where == "none":
            self._workloads = {name: NumpySum() for name in (GEMM, DECODE)}
            return {"workload": "numpy"}
        import torch

        if where == "cuda":
            gemm, decode = TorchGemm(torch, where), TorchDecode(torch, where)
        else:
            gemm = TorchGemm(torch, where, size=64)
            decode = TorchDecode(
                torch, where, hidden=64, ffn=128, layers=2, repeats=2, batch=4, heads=2, context=16
            )
        self._workloads = {GEMM: gemm, DECODE: decode}
        return {"workload": f"torch {torch.__version__} on {where}"}

    def measure(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Percentiles of the steps of one workload, over some seconds."""
        return measure(self._workloads[fields["workload"]], fields["seconds"])

    def open_kernels(self, fields: dict[str, Any], fds: list[int]) -> None:
        from tests.gpu.parts.kernel_regions import KernelRegions

        self._regions = KernelRegions(fields["region_bytes"], fields["directions"], fields["fragment_bytes"])

    def start(self, fields: dict[str, Any], fds: list[int]) -> None:
        self._regions.start(fields["directions"])

    def stop(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        return {"gb_per_s": self._regions.stop()}


def handlers() -> dict[str, Handler]:
    engine = Engine()
    return {
        "open": engine.open,
        "measure": engine.measure,
        "open_kernels": engine.open_kernels,
        "start": engine.start,
        "stop": engine.stop,
    }
