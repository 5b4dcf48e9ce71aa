"""The child that is killed: stores and loads without end, and says on stdout when a part of its has STARTED.

python -m tests.faults.campaigns.victim SOCKET INSTANCE FAMILY
"""

import sys
import time
from pathlib import Path

from kvtier import PartState

from tests.faults.campaigns.content import hashes_of
from tests.faults.campaigns.engine import PlainEngine

BATCH = 64
DEADLINE_S = 60.0


def main() -> None:
    socket, instance, family = sys.argv[1:]
    with PlainEngine(Path(socket), instance, num_blocks=2 * BATCH) as engine:
        engine.wait_ready()
        batch = 0
        while True:
            hashes = hashes_of(family, BATCH, first=batch * BATCH)
            ids = list(range(BATCH))
            engine.fill(ids, hashes)
            transfers = [engine.client.store(hashes, ids)]
            if batch:  # and a load of what it stored before, at the same time
                found = engine.client.lookup(hashes_of(family, BATCH, first=(batch - 1) * BATCH), lease=True)
                if found.lease:
                    transfers.append(engine.client.load(found, list(range(BATCH, BATCH + found.hits))))
            deadline_s = time.monotonic() + DEADLINE_S
            while any(not transfer.outcome.fenced for transfer in transfers):
                parts = (transfer.part for transfer in transfers)
                states = {engine.client.part_state(part) for part in parts if part is not None}
                if PartState.STARTED in states:
                    print("STARTED", flush=True)
                assert time.monotonic() < deadline_s, [transfer.outcome for transfer in transfers]
                time.sleep(0.0005)
            print("STORED", batch, flush=True)
            batch += 1


main()
