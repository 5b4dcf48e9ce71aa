"""What an engine computes while others copy: a large matrix product, and a decode-like step in a CUDA graph.

A step ends when its results are there. On the CPU, and without torch, the same steps run small, so that
everything around them can be tested.
"""

from __future__ import annotations

import gc
import time
from typing import Any, Protocol

import numpy as np

from tests.gpu.parts.bench import percentile

GEMM, DECODE = "gemm", "decode"
SMALL_INTS = 1_024
"""4 KiB."""


class Workload(Protocol):
    """One kind of step."""

    def step(self) -> None:
        """Runs one step to its end."""


class NumpySum:
    """Stands in where there is no torch; says nothing about GPUs."""

    def __init__(self, n: int = 1 << 14) -> None:
        rng = np.random.default_rng()
        self._a, self._b = rng.random(n), rng.random(n)

    def step(self) -> None:
        np.add(self._a, self._b, out=self._a)


class TorchGemm:
    """Products of two square matrices of random bfloat16 numbers: bound by arithmetic."""

    def __init__(self, torch: Any, device: str, size: int = 8_192, products: int = 1) -> None:
        self._torch = torch
        self._cuda = device.startswith("cuda")
        self._a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self._b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self._c = torch.empty_like(self._a)
        self._products = products

    def step(self) -> None:
        for _ in range(self._products):
            self._torch.mm(self._a, self._b, out=self._c)
        if self._cuda:
            self._torch.cuda.current_stream().synchronize()


class TorchDecode:
    """One token for each of `batch` sequences: projections whose weights are read once, and attention over
    cached keys and values, all of it one CUDA graph: bound by memory, as decoding is. Before it 4 KiB of
    input are copied to the device, and behind it 4 KiB of results back, as an engine does in each step."""

    def __init__(
        self,
        torch: Any,
        device: str,
        *,
        hidden: int = 4_096,
        ffn: int = 14_336,
        layers: int = 8,
        repeats: int = 2,
        batch: int = 32,
        heads: int = 8,
        context: int = 512,
    ) -> None:
        self._torch = torch
        self._hidden, self._heads, self._repeats = hidden, heads, repeats
        head = hidden // heads

        def random(*shape: int) -> Any:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16) / shape[-2] ** 0.5

        self._layers = [
            (random(hidden, hidden), random(hidden, hidden), random(hidden, ffn), random(ffn, hidden))
            for _ in range(layers)
        ]
        self._keys = random(batch * heads, head, context)
        self._values = random(batch * heads, context, head)
        self._x = torch.randn(batch, hidden, device=device, dtype=torch.bfloat16)
        on_gpu = device.startswith("cuda")
        small = {"dtype": torch.int32, "pin_memory": on_gpu}
        self._inputs, self._results = torch.zeros(SMALL_INTS, **small), torch.zeros(SMALL_INTS, **small)
        self._small = torch.zeros(SMALL_INTS, dtype=torch.int32, device=device)
        self._graph: Any = None
        if on_gpu:
            self._capture()

    def forward(self) -> Any:
        """The computation, enqueued."""
        torch, x = self._torch, self._x
        for _ in range(self._repeats):
            for query, out, up, down in self._layers:
                normed = torch.nn.functional.layer_norm(x, (self._hidden,))
                q = (normed @ query).view(x.shape[0] * self._heads, 1, -1)
                scores = torch.softmax(torch.bmm(q, self._keys), dim=-1)
                attended = torch.bmm(scores, self._values).reshape(x.shape[0], self._hidden)
                x = x + attended @ out
                normed = torch.nn.functional.layer_norm(x, (self._hidden,))
                x = x + torch.nn.functional.silu(normed @ up) @ down
        return x

    def step(self) -> None:
        self._small.copy_(self._inputs, non_blocking=True)
        if self._graph is None:
            self.forward()
        else:
            self._graph.replay()
        self._results.copy_(self._small, non_blocking=True)
        if self._graph is not None:
            self._torch.cuda.current_stream().synchronize()

    def _capture(self) -> None:
        torch = self._torch
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self.forward()
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self.forward()
        torch.cuda.synchronize()


def measure(workload: Workload, seconds: float, steps_min: int = 20) -> dict[str, float]:
    """Times step after step for this long, and at least so many; microseconds."""
    for _ in range(5):
        workload.step()
    taken: list[float] = []
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        before = time.perf_counter()
        while before < end or len(taken) < steps_min:
            workload.step()
            now = time.perf_counter()
            taken.append((now - before) * 1e6)
            before = now
    finally:
        gc.enable()
    return {
        "steps": len(taken),
        "p50_us": round(percentile(taken, 50), 1),
        "p99_us": round(percentile(taken, 99), 1),
        "max_us": round(max(taken), 1),
        "mean_us": round(sum(taken) / len(taken), 1),
    }
