"""The child that is stopped. It stores, loads, holds a lease, and keeps a store waiting for its doorbell,
without end. Whatever becomes of them, it compares what it is told to have, and goes on.

python -m tests.faults.campaigns.sleeper SOCKET NAME

Prints STARTED when a part of its transfer is being copied, STORED n when a batch is DONE, REFUSED reason when
its old lease is worth nothing, and TURN epoch compared wrong holds at the end of each turn.
"""

import sys
import time
from collections import Counter
from pathlib import Path

from kvtier import Doorbell, Lookup, PartState, Transfer

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine

BATCH = 64
GATED = 8
DEADLINE_S = 60.0
SOURCE, TARGET, HELD, WAITING = (list(range(n * BATCH, (n + 1) * BATCH)) for n in range(4))


class Sleeper:
    """One engine."""

    def __init__(self, engine: PlainEngine, name: str) -> None:
        self._engine = engine
        self._client = engine.client
        self._name = name
        self._count: Counter[str] = Counter()
        self._done: list[list[bytes]] = []
        self._held: Lookup | None = None

    def run(self) -> None:
        turn = 0
        while True:
            self._engine.wait_ready()
            turn += 1
            self._turn(turn)

    def _turn(self, turn: int) -> None:
        gated = hashes_of(f"{self._name}-gated", GATED, first=turn * GATED)
        self._engine.fill(WAITING[:GATED], gated)
        waiting = self._client.store(gated, WAITING[:GATED], doorbell=Doorbell(0, turn))
        if self._done and self._held is None:
            self._held = self._client.lookup(self._done[0], lease=True, timeout_s=1)
        hashes = hashes_of(self._name, BATCH, first=turn * BATCH)
        self._engine.fill(SOURCE, hashes)
        store = self._client.store(hashes, SOURCE)
        load, wanted = self._load_last()
        self._follow([store, *([load] if load else [])])
        if load and load.wait(DEADLINE_S).done:
            compare(self._engine.read(TARGET[: len(wanted)]), wanted, self._count)
        if store.wait(DEADLINE_S).done:
            self._done = [*self._done[:1], hashes]
            print("STORED", turn, flush=True)
        self._client.ring(0, turn)
        assert waiting.wait(DEADLINE_S).fenced
        self._use_lease()
        counted = self._count["blocks_compared"], self._count["wrong_bytes"]
        print("TURN", self._client.status.epoch or 0, *counted, int(self._held is not None), flush=True)

    def _load_last(self) -> tuple[Transfer | None, list[bytes]]:
        if not self._done:
            return None, []
        found = self._client.lookup(self._done[-1], lease=True, timeout_s=1)
        if not found.hits or found.lease is None:
            return None, []
        self._engine.wipe(TARGET)
        return self._client.load(found, TARGET[: found.hits]), self._done[-1][: found.hits]

    def _follow(self, transfers: list[Transfer]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while any(not transfer.outcome.fenced for transfer in transfers):
            parts = [transfer.part for transfer in transfers if transfer.part is not None]
            if PartState.STARTED in {self._client.part_state(part) for part in parts}:
                print("STARTED", flush=True)
            assert time.monotonic() < deadline_s, [transfer.outcome for transfer in transfers]
            time.sleep(0.0005)

    def _use_lease(self) -> None:
        """Loads what its oldest lease holds: right bytes, or a refusal."""
        if self._held is None or self._held.lease is None:
            self._held = None
            return
        into = HELD[: self._held.hits]
        self._engine.wipe(into)
        outcome = self._client.load(self._held, into, keep_lease=True).wait(DEADLINE_S)
        assert outcome.fenced
        if outcome.done:
            compare(self._engine.read(into), self._done[0][: self._held.hits], self._count)
            return
        if outcome.refused and outcome.error is not None:
            print("REFUSED", outcome.error.reason.name, flush=True)
            assert (self._engine.read(into) == 0x5A).all(), "a refused load has written"
        self._held.release()
        self._held = None


def main() -> None:
    socket, name = sys.argv[1:]
    with PlainEngine(Path(socket), name, num_blocks=4 * BATCH) as engine:
        Sleeper(engine, name).run()


if __name__ == "__main__":
    main()
