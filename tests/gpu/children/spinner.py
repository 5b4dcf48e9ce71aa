"""A process whose kernels keep every multiprocessor busy, in runs of about 20 ms."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.gpu.parts.child import Handler

SPIN_CYCLES = 2_000_000
"""About a millisecond."""
STOP_S = 30.0


class Spinner:
    """Answers `open`, `start` and `stop`. Without kernels, on the fake driver, it only waits."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def open(self, fields: dict[str, Any], fds: list[int]) -> None:
        self._torch: Any = None
        if fields["kernels"]:
            import torch

            self._torch = torch
            self._large = torch.ones(64 << 20, device="cuda")
            torch.cuda.synchronize()

    def start(self, fields: dict[str, Any], fds: list[int]) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, fields: dict[str, Any], fds: list[int]) -> None:
        self._stopping.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._torch is None:
                time.sleep(0.01)
                continue
            for _ in range(20):
                self._torch.cuda._sleep(SPIN_CYCLES)
                self._large.mul_(1.0)
            self._torch.cuda.synchronize()


def handlers() -> dict[str, Handler]:
    spinner = Spinner()
    return {"open": spinner.open, "start": spinner.start, "stop": spinner.stop}
