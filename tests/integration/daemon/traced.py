"""An engine without a cache of its own, with one request after another: those of a published trace where it
is at hand, else made up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kvtier.v1 import types_pb2
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.simulate.host import hashes_of
from kvtierd.simulate.traces import I64, read

from tests.integration.daemon.raw import RawSession

Connect = Callable[..., RawSession]
FRAGMENT = 32 << 10
POOL = PoolGeometry(extents=64, extent_bytes=1 << 20, first_extent_offset=2 << 20)
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
    hits = ask(one, prompt)
    store(one, prompt)
    return hits


def ask(one: RawSession, prompt: I64) -> int:
    return int(one.lookup(hashes_of(prompt).tobytes()).answers[0].hits)


def store(one: RawSession, prompt: I64, first: int = 0) -> None:
    """Stores the blocks of a prompt from this one on, and waits for it."""
    hashes = hashes_of(prompt)
    blocks = len(prompt) - first
    message = one.store_request(hashes[first:].tobytes(), list(range(blocks)))
    message.chains.add(blocks=blocks, previous_hash=hashes[first - 1].tobytes() if first else b"")
    one.attached.call(store=message)
    assert one.wait(message.signals.ticket).state == types_pb2.TRANSFER_STATE_DONE


def engine(connect: Connect) -> RawSession:
    return connect(fragments=(FRAGMENT,), num_blocks=PROMPT_BLOCKS_MAX).ready()
