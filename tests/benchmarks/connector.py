"""What the vLLM connector costs the scheduler, per step, with 64 requests that wait.

    python -m tests.benchmarks.connector [--json]

The scheduler's half of the connector against a real daemon: in every step it is asked about each of 64
requests that wait, of 128 blocks each, all of which the daemon holds, submits the stores of 16 running ones,
and makes the step's metadata. In each step four requests are let in, and four new ones come. `misses`: the
same with requests of which the daemon holds nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
from kvtier import Client
from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.groups import Groups
from kvtier_vllm.meta import STORE_DOORBELL
from kvtier_vllm.scheduler.side import SchedulerSide

from tests.benchmarks.rig import DEADLINE_S, hashes_of, rig

WAITING, RUNNING, BLOCKS, TOKENS, NEW = 64, 16, 128, 16, 4
FAMILIES = 8
STEPS, WARM_UP = 250, 50
STEP_PAUSE_S = 0.02
"""For the model: the connector's threads have that long between two steps."""
NUM_BLOCKS = 2_048


class ReadyLink:
    """The client of the rig, as the connector's link shows it."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def wait_ready(self, timeout_s: float) -> bool:
        return self.client.wait_ready(timeout_s)

    def close(self, timeout_s: float) -> bool:
        return True


def request(name: str, hashes: list[bytes]) -> Any:
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=len(hashes) * TOKENS + 1,
        num_computed_tokens=0,
        num_preemptions=0,
    )


class Steps:
    """The calls that vLLM's scheduler makes, step after step."""

    def __init__(self, side: SchedulerSide, client: Client, hits: bool) -> None:
        self._side, self._client, self._hits = side, client, hits
        self._numbers = itertools.count()
        self._prefixes = [hashes_of(f"prefix/{family}", BLOCKS) for family in range(FAMILIES)]
        for family, prefix in enumerate(self._prefixes):
            first = family * BLOCKS
            if not client.store(prefix, list(range(first, first + BLOCKS))).wait(DEADLINE_S).done:
                raise RuntimeError("a store failed")
        self._waiting: deque[Any] = deque(self._new() for _ in range(WAITING))
        self._running = [self._start() for _ in range(RUNNING)]
        self.asked = self.promised = self.stores = 0

    def _new(self) -> Any:
        number = next(self._numbers)
        name = f"waiting/{number}"
        return request(name, self._prefixes[number % FAMILIES] if self._hits else hashes_of(name, BLOCKS))

    def _start(self) -> Any:
        """A request that nobody has computed before, let in."""
        name = f"running/{next(self._numbers)}"
        started = request(name, hashes_of(name, BLOCKS))
        self._side.allocated(started, (range(1, BLOCKS + 1),), 0)
        return started

    def step(self) -> None:
        """One step, as far as the connector takes part in it."""
        let_in: list[Any] = []
        for waiting in self._waiting:
            tokens = self._side.match(waiting, 0)
            self.asked += 1
            self.promised += bool(tokens)
            if tokens is not None and len(let_in) < NEW:
                let_in.append(waiting)
        for one in let_in:
            self._side.allocated(
                one, (range(1, BLOCKS + 1),), 0
            )  # let in; its blocks are the engine's by now
        scheduled = {running.request_id: TOKENS for running in self._running}
        tables = {running.request_id: (range(1_024, 1_024 + BLOCKS),) for running in self._running}
        state = SimpleNamespace(get_block_ids=tables.get)
        self._side.plan_step(SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state))
        self._meta = self._side.take_metadata()
        for running in self._running:
            running.num_computed_tokens += TOKENS
        self._let_in = let_in

    def next(self) -> None:
        """What happens between two steps and is not the scheduler's."""
        orders = self._meta.orders
        self.stores += 0 if orders is None else len(orders.stores)
        self._client.ring(STORE_DOORBELL, self._meta.step)
        for one in self._let_in:
            self._waiting.remove(one)
            self._side.finished(one.request_id)
            self._waiting.append(self._new())
        for index, running in enumerate(self._running):
            if running.num_computed_tokens >= BLOCKS * TOKENS:
                self._side.finished(running.request_id)
                self._running[index] = self._start()


def measure(hits: bool) -> np.ndarray:
    """Milliseconds of each step."""
    with rig(num_blocks=NUM_BLOCKS, planes=1, fragment_bytes=4_096, pool_size="258MiB") as running:
        link: Any = ReadyLink(running.client)
        side = SchedulerSide(
            ConnectorConfig(), Groups.one(TOKENS), lambda _: link, logging.getLogger("bench")
        )
        steps = Steps(side, running.client, hits)
        taken = np.empty(WARM_UP + STEPS)
        for index in range(len(taken)):
            start = time.perf_counter_ns()
            steps.step()
            taken[index] = time.perf_counter_ns() - start
            steps.next()
            time.sleep(STEP_PAUSE_S)
    if hits != (steps.promised >= steps.asked / 2) or hits == (steps.promised == 0) or not steps.stores:
        raise RuntimeError(
            f"{steps.promised} hits of {steps.asked}, {steps.stores} stores: that is not what is measured"
        )
    return taken[WARM_UP:] / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description="The connector's cost in the scheduler.")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    arguments = parser.parse_args()
    figures = {}
    for name, hits in (("waiting", True), ("misses", False)):
        taken = measure(hits)
        figures[f"connector_step_64_{name}_ms"] = float(np.percentile(taken, 50))
        figures[f"connector_step_64_{name}_p99_ms"] = float(np.percentile(taken, 99))
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<44} {value:>12,.3f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
