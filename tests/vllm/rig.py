"""A daemon and an engine that uses it, as the tests of the connector want them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from kvtier_kernels import PoolRecords

from tests.support.daemon import DaemonHost, until
from tests.vllm.engine import Engine, EngineOptions, Generated

PAGE_BYTES = 4096
BLOCK = 32
PATIENT_S = 60.0
"""So long do engines of tests wait that are not about their impatience: on a busy machine a daemon may not
get the processor for seconds."""


def kv_transfer_config(socket: Path, **extra: object) -> dict[str, Any]:
    """As a user writes it, but for what is not worth a load: tiny models compute that quickly that nearly
    nothing would be."""
    extra = {"min_load_tokens": 1} | extra
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # Resets flush the cache in most tests. And the first hit after each attachment would have one block
        # less. Both have tests of their own.
        "kv_connector_extra_config": {"socket": str(socket), "on_reset": "keep", "audit_rate": 0} | extra,
    }


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without repetition worth the name."""
    return [(7 * i * i + 11 * i + 131 * seed + seed * i) % 1000 for i in range(length)]


def full_blocks(tokens: int) -> int:
    """Tokens of a prompt that can be cached: whole blocks, the last token always computed."""
    return (tokens - 1) // BLOCK * BLOCK


def same(one: Generated, other: Generated) -> bool:
    """Bit for bit."""
    return one.tokens == other.tokens and one.logprobs == other.logprobs


class Rig:
    """One engine, and the place where its daemon is."""

    def __init__(self, host: DaemonHost, engine: Engine) -> None:
        self.host = host
        self.engine = engine

    def look(self, expression: str) -> Any:
        """Evaluated inside the engine's process: `side` and `worker` are the connector's halves, `client` and
        `rank` their clients."""
        return self.engine.call("evaluate", expression=expression)["value"]

    def patient(self, patient: bool = True) -> None:
        """From now on the engine takes a daemon that is silent for slow, and not for dead, and gives up no
        copy that has not started; or not any more."""
        self.engine.call("patience", seconds=PATIENT_S if patient else None)

    def wait_ready(self) -> None:
        """Until lookups, stores and loads work, with the daemon that runs now: stores pause for a moment
        after one was refused."""
        nonce = self.host.status().boot_nonce
        until(
            # After a reset there is no client until a thread has made one.
            lambda: self.look("client is not None and client.ready and client.status.boot_nonce") == nonce,
            "the engine is attached and registered",
        )
        until(lambda: self.look("side.storing"), "the engine stores")

    def wait_away(self) -> None:
        """Until the engine has noticed that its daemon is not there, or does not answer."""
        until(lambda: not self.look("client.ready"), "the engine misses its daemon")

    def wait_stored(self) -> None:
        """Until every submitted store has ended."""
        until(lambda: self.look("client.status.transfers_active") == 0, "all transfers have ended")

    def generate(
        self, tokens: list[int], max_tokens: int = 16, lora: tuple[str, int, str] | None = None
    ) -> Generated:
        """One request, alone."""
        return self.engine.generate([tokens], max_tokens=max_tokens, lora=lora)[0]

    def forget(self) -> None:
        """The engine loses every KV byte it has, and what it knows of them."""
        self.engine.drain()
        self.engine.reset_prefix_cache()
        self.engine.overwrite_cache()

    def compute_and_hit(self, tokens: list[int]) -> Generated:
        """Computes a prompt, stores it; returns what a hit in the engine's own cache gives."""
        return self.both(tokens)[1]

    def both(self, tokens: list[int]) -> tuple[Generated, Generated]:
        """Computes a prompt and stores it: the answer then, and that of a hit in the engine's own cache. The
        two may differ, because a prefill in one piece rounds otherwise than one in two."""
        cold = self.generate(tokens)
        hit = self.generate(tokens)
        assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, full_blocks(len(tokens)))
        self.wait_stored()
        return cold, hit


def flip_a_byte_of_every_block(pool: Path) -> int:
    """In the pool file, whoever has it open. Returns the number of blocks."""
    with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        found = PoolRecords(np.frombuffer(mapping, np.uint8)).scan()
        slots = [int(slot) for slot, intact in zip(found["slots"], found["intact"], strict=True) if intact]
        del found
        for slot in slots:
            mapping[slot * PAGE_BYTES + 1] ^= 0xFF
    return len(slots)


def start_rig(host: DaemonHost, options: EngineOptions, log: Path) -> Rig:
    """An engine that is attached to its daemon, and patient with it."""
    rig = Rig(host, Engine.start(options, log))
    rig.patient()
    rig.wait_ready()
    return rig
