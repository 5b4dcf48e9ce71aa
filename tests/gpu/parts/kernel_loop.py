"""Keeps the link busy with copy kernels, from a thread and a stream of their own. Needs torch and Triton."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Self

import torch

from tests.gpu.parts import kernels
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.loops import BATCHES, FLIGHTS, H2D, STOP_S

PROGRAMS = 12
"""As many as vLLM's own copy kernel takes on an H100."""


class KernelLoop:
    """Copies the fragments of a region, each time in another order, two launches in flight, until it is
    stopped."""

    def __init__(
        self,
        direction: str,
        host: HostMemory,
        on_device: Any,
        *,
        fragment_bytes: int,
        programs: int = PROGRAMS,
    ) -> None:
        """`host` is registered; `on_device` is an int64 CUDA tensor of as many bytes."""
        in_host = torch.from_numpy(host.array).view(torch.int64)
        self._source, self._target = (in_host, on_device) if direction == H2D else (on_device, in_host)
        count = host.n // fragment_bytes
        self._indexes = [
            (torch.randperm(count, device=on_device.device), torch.randperm(count, device=on_device.device))
            for _ in range(BATCHES)
        ]
        self._batch_bytes = count * fragment_bytes
        self._fragment_bytes = fragment_bytes
        self._programs = programs
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kernels-{direction}", daemon=True)
        self.copied_bytes = 0
        self.seconds = 0.0
        self.error: Exception | None = None
        self.launch(0)  # compiled before anything is timed
        torch.cuda.synchronize()

    def indexes(self, turn: int) -> tuple[Any, Any]:
        """Which fragments a batch takes, and where they go."""
        return self._indexes[turn % BATCHES]

    def launch(self, turn: int) -> None:
        """One batch on torch's current stream."""
        source_index, target_index = self.indexes(turn)
        kernels.copy_fragments(
            self._source, self._target, source_index, target_index, self._fragment_bytes, self._programs
        )

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Returns when nothing is in flight."""
        self._stopping.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise TimeoutError(f"copy kernels still run {STOP_S} s after they were told to stop")

    def rate_gb_per_s(self) -> float:
        """Over the whole time that it ran."""
        return self.copied_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            stream = torch.cuda.Stream()
            flying: deque[Any] = deque()
            turn = 0
            with torch.cuda.stream(stream):
                while not self._stopping.is_set():
                    if len(flying) == FLIGHTS:
                        flying.popleft().synchronize()
                        self.copied_bytes += self._batch_bytes
                    self.launch(turn)
                    event = torch.cuda.Event(blocking=True)
                    event.record()
                    flying.append(event)
                    turn += 1
                stream.synchronize()
            self.copied_bytes += len(flying) * self._batch_bytes
        except Exception as error:  # said by whoever stops the loop
            self.error = error
        self.seconds = time.perf_counter() - begin
