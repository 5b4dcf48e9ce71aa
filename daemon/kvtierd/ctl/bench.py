"""`kvtierctl bench`: how fast the running daemon stores, loads and looks up, as one more client sees it.

It uses a namespace of its own, so nobody's blocks are touched; few bytes, so that few blocks are evicted; and
clears them afterwards.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvtier import Client, Group, Namespace, Outcome, Plane, SharedBuffer, Transfer
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from kvtierd.config.settings import human_size
from kvtierd.ctl.text import usable_bytes

POOL_FRACTION_MAX = 1 / 8
"""The largest share of the pool that is stored. If nothing is free, the oldest blocks of others are
evicted."""
SIZE_BYTES = 64 << 20
SIZE_BYTES_MAX = 4 << 30
"""The most that is stored at once; the program itself needs twice as much memory."""
BLOCK_BYTES_MIN = 4 << 10
HASHES_MAX = 1_024
"""The most hashes of one lookup."""
BATCH = 64
"""The most blocks of one transfer."""
TRANSFERS_AT_ONCE = 4
LOADS = 5
LOOKUPS = 500
READY_S = 15.0
WAIT_S = 60.0
CLEAR_TRIES = 50
CLEAR_RETRY_S = 0.1
MODEL = "kvtierctl bench"


class BenchError(Exception):
    """The daemon could not be measured; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Latency:
    hashes: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The results. GB are 10^9 bytes. The host may have done other things meanwhile."""

    daemon_version: str
    blocks: int
    block_bytes: int
    store_gb_per_s: float
    """The speed from the submission of the first store to the end of the last."""
    load_gb_per_s: float
    """The speed from the submission of the first load to the end of the last; the median of LOADS rounds."""
    wrong_blocks: int
    """How many blocks came back with other bytes than were stored; anything but 0 is an error of kvtier."""
    lookup_hit_one: Latency
    lookup_hit_all: Latency
    lookup_miss_one: Latency
    left_blocks: int
    """How many blocks could not be cleared afterwards, because they were still on their way to a disk."""


def bench(
    socket: Path,
    admin: admin_pb2_grpc.AdminStub,
    size_bytes: int | None,
    block_bytes: int,
    check_stop: Callable[[], None],
) -> Figures:
    """Measures. At most `size_bytes` are stored, in blocks of `block_bytes`; None for SIZE_BYTES, or what the
    pool allows. Calls `check_stop()` again and again; if that raises, the measurement ends. Raises
    BenchError, and grpc.RpcError if the daemon ends meanwhile. No block stays unless the daemon has ended."""
    status = admin.Status(admin_pb2.StatusRequest(), timeout=WAIT_S, wait_for_ready=False)
    most = min(SIZE_BYTES_MAX, int(usable_bytes(status.pool) * POOL_FRACTION_MAX))
    if size_bytes is None:
        size_bytes = min(SIZE_BYTES, most)
    if size_bytes > most:
        raise BenchError(
            f"--size {human_size(size_bytes)} is too much for a pool of "
            f"{human_size(usable_bytes(status.pool))}: {human_size(most)} at most"
        )
    if block_bytes < BLOCK_BYTES_MIN:
        raise BenchError(f"--block {human_size(block_bytes)}: {human_size(BLOCK_BYTES_MIN)} at least")
    blocks = size_bytes // block_bytes
    if blocks == 0:
        raise BenchError(f"--block {human_size(block_bytes)} is larger than --size {human_size(size_bytes)}")
    instance = f"kvtierctl-bench-{os.getpid()}-{secrets.token_hex(4)}"
    with SharedBuffer.create(2 * blocks * block_bytes) as memory:
        plane = Plane(fragment_bytes=block_bytes, base_offset=0, block_stride_bytes=block_bytes)
        group = Group(block_tokens=1, num_blocks=2 * blocks, planes=(plane,))
        # Nobody else knows the salt, so nobody has stored there before, and nobody finds anything there.
        namespace = Namespace(
            model=MODEL, kv_dtype="uint8", hash_scheme="kvtierctl:random", salt=secrets.token_hex(16)
        )
        with Client(
            instance=instance,
            namespace=namespace,
            groups=[group],
            memory=memory,
            socket=socket,
            program="kvtierctl",
        ) as client:
            if not client.wait_ready(READY_S):
                found = client.status
                why = found.last_error or found.why
                raise BenchError(f"it could not be used as an engine uses it within {READY_S:g} s: {why}")
            digest = client.status.namespace_digest
            array = memory.array.reshape(2 * blocks, block_bytes)
            run = _Run(client, array, blocks, block_bytes, check_stop)
            try:
                store_s = run.store()
                load_s, wrong = run.load()
                one, every, missed = run.lookups()
            finally:
                run.end()  # otherwise a store could end after the clearing, and stay
                left = _clear(admin, digest)
    return Figures(
        daemon_version=status.version,
        blocks=blocks,
        block_bytes=block_bytes,
        store_gb_per_s=blocks * block_bytes / store_s / 1e9,
        load_gb_per_s=blocks * block_bytes / load_s / 1e9,
        wrong_blocks=wrong,
        lookup_hit_one=one,
        lookup_hit_all=every,
        lookup_miss_one=missed,
        left_blocks=left,
    )


class _Run:
    """One measurement: it stores from the first half of the memory, and loads into the second half."""

    def __init__(
        self,
        client: Client,
        memory: "np.ndarray",
        blocks: int,
        block_bytes: int,
        check_stop: Callable[[], None],
    ) -> None:
        self._check_stop = check_stop
        self._client = client
        self._memory = memory
        self._blocks = blocks
        self._hashes = [secrets.token_bytes(32) for _ in range(blocks)]
        self._running: list[Transfer] = []
        memory[:blocks] = np.random.default_rng().integers(0, 256, (blocks, block_bytes), np.uint8)

    def store(self) -> float:
        """Stores every block once; returns the seconds that it took."""
        return self._all_batches(
            "stored", lambda first, last: self._client.store(self._hashes[first:last], range(first, last))
        )

    def load(self) -> tuple[float, int]:
        """Loads every block LOADS times; returns the median of the seconds, and how many blocks came back
        wrong."""
        seconds, wrong = [], 0
        for _ in range(LOADS):
            self._memory[self._blocks :] = 0
            seconds.append(self._all_batches("loaded", self._load))
            same = (self._memory[self._blocks :] == self._memory[: self._blocks]).all(axis=1)
            wrong += int(np.count_nonzero(~same))
        return float(np.median(seconds)), wrong

    def _load(self, first: int, last: int) -> Transfer:
        found = self._client.lookup(self._hashes[first:last], lease=True, timeout_s=WAIT_S)
        if found.hits != last - first:
            found.release()
            raise BenchError(
                f"{last - first - found.hits} of {last - first} blocks are not there any more: the pool is "
                "full of what is in use, or somebody has cleared it; try again with a smaller --size"
            )
        return self._client.load(found, range(self._blocks + first, self._blocks + last))

    def _all_batches(self, what: str, submit: Callable[[int, int], Transfer]) -> float:
        began_s = time.perf_counter()
        for first in range(0, self._blocks, BATCH):
            self._check_stop()
            if len(self._running) == TRANSFERS_AT_ONCE:
                _check(what, self._running.pop(0).wait(WAIT_S))
            self._running.append(submit(first, min(first + BATCH, self._blocks)))
        while self._running:
            self._check_stop()
            _check(what, self._running.pop(0).wait(WAIT_S))
        return time.perf_counter() - began_s

    def end(self) -> None:
        """Cancels what still runs, and waits for its end, at most WAIT_S for all of it."""
        deadline_s = time.monotonic() + WAIT_S
        for transfer in self._running:
            transfer.cancel()
        for transfer in self._running:
            transfer.wait(max(0.0, deadline_s - time.monotonic()))
        self._running.clear()

    def lookups(self) -> tuple[Latency, Latency, Latency]:
        """Measures lookups of one stored block, of all (at most HASHES_MAX), and of one that is not
        stored."""
        absent = [secrets.token_bytes(32)]
        return (
            self._latency(self._hashes[:1]),
            self._latency(self._hashes[:HASHES_MAX]),
            self._latency(absent),
        )

    def _latency(self, hashes: Sequence[bytes]) -> Latency:
        taken = []
        for _ in range(LOOKUPS):
            self._check_stop()
            began_s = time.perf_counter()
            self._client.lookup(hashes, timeout_s=WAIT_S)
            taken.append((time.perf_counter() - began_s) * 1e6)
        p50, p99 = np.percentile(taken, (50, 99))
        return Latency(len(hashes), float(p50), float(p99))


def _check(what: str, outcome: Outcome) -> None:
    if not outcome.done:
        raise BenchError(f"not all blocks could be {what}: {outcome}; kvtierctl status and the log say more")


def _clear(admin: admin_pb2_grpc.AdminStub, digest: str) -> int:
    """Clears the namespace, again and again while blocks are being written to a disk. Returns how many
    stay."""
    left = 0
    for _ in range(CLEAR_TRIES):
        request = admin_pb2.ClearRequest(namespace=digest, timeout_ms=round(WAIT_S * 1000))
        answer = admin.Clear(request, timeout=2 * WAIT_S, wait_for_ready=False)
        left = answer.held_blocks + answer.under_way_blocks
        if not left:
            return 0
        time.sleep(CLEAR_RETRY_S)
    return left


def lines(figures: Figures) -> Iterator[str]:
    """The figures for people, line by line."""
    size = figures.blocks * figures.block_bytes
    yield f"kvtierd {figures.daemon_version}, {figures.blocks:,} blocks of {human_size(figures.block_bytes)}"
    yield f"  store   {figures.store_gb_per_s:6.2f} GB/s   {human_size(size)}"
    how = f"{human_size(size)}, median of {LOADS}, every byte compared"
    yield f"  load    {figures.load_gb_per_s:6.2f} GB/s   {how}"
    for what, latency in (
        ("there", figures.lookup_hit_one),
        ("there", figures.lookup_hit_all),
        ("not there", figures.lookup_miss_one),
    ):
        hashes = f"{latency.hashes:,} {'hash' if latency.hashes == 1 else 'hashes'}"
        yield f"  lookup  p50 {latency.p50_us:,.0f} µs, p99 {latency.p99_us:,.0f} µs   {hashes} {what}"
    if figures.wrong_blocks:
        yield f"  WRONG   {figures.wrong_blocks:,} blocks came back with other bytes"
    if figures.left_blocks:
        yield f"  left    {figures.left_blocks:,} blocks are on their way to a disk: kvtierctl clear, later"
