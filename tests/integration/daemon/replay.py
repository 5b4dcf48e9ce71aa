"""An engine without a cache of its own that replays prompts, one after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kvtier.v1 import types_pb2
from kvtierd.simulate.host import hashes_of
from kvtierd.simulate.traces import I64, read

from tests.integration.daemon.raw import RawSession

Connect = Callable[..., RawSession]
FRAGMENT = 32 << 10
REQUESTS = 2_000
"""Of a published trace, where it is at hand (KVTIER_TRACES); else of one that is made up."""
PROMPT_BLOCKS_MAX = 256


def prompts() -> list[I64]:
    """As blocks that are known by their numbers."""
    folder = os.environ.get("KVTIER_TRACES")
    path = Path(folder or "traces") / "mooncake_conversation.npz"
    if path.exists():
        trace = read(path)
        return [trace.path(number)[:PROMPT_BLOCKS_MAX] for number in range(REQUESTS)]
    random = np.random.default_rng(3)
    found = []
    fresh = 0
    lengths = [4] * 60
    for _ in range(600):
        if random.random() < 0.5:
            fresh += 1
            found.append(np.arange(20) + (1 << 32) + 100 * fresh)
        else:
            session = min(int(random.zipf(1.4)), 60) - 1
            lengths[session] = min(lengths[session] + 2, PROMPT_BLOCKS_MAX)
            found.append(np.arange(lengths[session]) + 1_000 * session)
    return found


def request(one: RawSession, prompt: I64) -> int:
    """Asks for a prompt, and stores what was missing. Returns how many of its first blocks were there."""
    hashes = hashes_of(prompt).tobytes()
    hits = one.lookup(hashes).answers[0].hits
    store = one.store_request(hashes, list(range(len(prompt))))
    store.chains.add(blocks=len(prompt))
    one.attached.call(store=store)
    assert one.wait(store.signals.ticket).state == types_pb2.TRANSFER_STATE_DONE
    return hits


def engine(connect: Connect) -> RawSession:
    return connect(fragments=(FRAGMENT,), num_blocks=PROMPT_BLOCKS_MAX).ready()
