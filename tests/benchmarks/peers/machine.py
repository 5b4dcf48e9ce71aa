"""The machine that a run was made on, how busy it was, and how far figures can be trusted."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SPREAD_MAX = 0.10
"""Repetitions that differ by more are called noisy."""


@dataclass(frozen=True)
class Busy:
    """How busy the machine has been up to some moment."""

    at_s: float
    steal_s: float
    idle_s: float
    cores: int

    @classmethod
    def now(cls) -> Busy:
        times = psutil.cpu_times()
        return cls(time.monotonic(), getattr(times, "steal", 0.0), times.idle, os.cpu_count() or 1)

    def since(self, before: Busy) -> dict[str, float]:
        """Between two moments: load average (of the last minute), and parts of all cores' time that the host
        gave to other machines (steal), and that nothing ran (idle)."""
        span_s = max(1e-9, self.at_s - before.at_s) * self.cores
        return {
            "load_1m": os.getloadavg()[0],
            "steal_part": max(0.0, self.steal_s - before.steal_s) / span_s,
            "idle_part": max(0.0, self.idle_s - before.idle_s) / span_s,
            "seconds": self.at_s - before.at_s,
        }


def spread(samples: Sequence[float]) -> float:
    """The quartiles' distance ÷ the median; infinite for less than four samples."""
    if len(samples) < 4:
        return float("inf")
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle


def is_noisy(samples: Sequence[float]) -> bool:
    """Whether repetitions differ by too much."""
    return spread(samples) > SPREAD_MAX


def describe() -> dict[str, object]:
    """Processor, memory, system: for people."""
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "processor": ", ".join(sorted(models)) or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }
