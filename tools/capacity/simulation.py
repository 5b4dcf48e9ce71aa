"""A fleet of hosts with a shared store, simulated request by request: what hits where, and what the store is
asked for. Each host has a pool by recency. Nothing in it takes time but getting to know of what others put.

`tests/unit/simulate/test_fleet.py` compares it with the daemon's own core, and with a slow simulation, block
by block.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from tools.capacity import model
from tools.capacity.segments import I64, Requests, mixed

PUT_S = 0.2
"""How long it takes to put a pack."""
NEVER = math.inf


class Router(Enum):
    """Which host a request goes to."""

    ROUND_ROBIN = "round-robin"
    """The next one."""
    PREFIX = "prefix"
    """By a hash of its first blocks behind what is common to all."""


class PutMode(Enum):
    """store.write_mode."""

    ON_REUSE = "on-reuse"
    THROUGH = "through"
    NEVER = "never"
    """No store."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The fleet. Sizes are in blocks of the trace."""

    hosts: int
    pool_blocks: int
    router: Router = Router.PREFIX
    mode: PutMode = PutMode.ON_REUSE
    remembered_blocks: float = math.inf
    """Of the store (store.size)."""
    look_every_s: float = 5.0
    list_s: float = 0.1
    get_s: float = 0.03
    blocks_per_pack: float = 1.0
    """Blocks of the trace in a full pack: may be less than one."""


@dataclass(slots=True)
class Counts:
    """What was counted. Blocks are those of the trace."""

    requests: int = 0
    tokens: int = 0
    asked_blocks: int = 0
    host_hit_tokens: int = 0
    """Tokens that were in the host's own pool."""
    store_hit_tokens: int = 0
    """Tokens behind those that were read from the store."""
    read_blocks: int = 0
    packs_read: float = 0.0
    put_blocks: int = 0
    put_again_blocks: int = 0
    """Of those, blocks that were in the store, without the host knowing."""
    puts: int = 0
    putting_requests: int = 0
    lists: int = 0
    head_reads: int = 0
    known_after_s: float = 0.0
    """How long it took until others knew of what was put, the mean over packs that came to be known."""
    unknown_packs: int = 0
    """Packs that nobody else knew of at the end."""
    busiest: float = 0.0
    """What the host with most tokens had, as a multiple of the mean."""
    hits: list[int] = field(default_factory=list)
    """By request: how many first blocks were there."""


class _Follower:
    """How hosts come to know of packs. All of them look at the same times."""

    def __init__(self, setting: Setting, counts: Counts) -> None:
        self._setting = setting
        self._counts = counts
        self._landed: deque[tuple[float, int, int, int]] = deque()
        """Bursts that nobody has seen: when they were in the store, their packs, blocks and numbers."""
        self._window: deque[tuple[float, int]] = deque()
        self._in_window = 0
        self._to_see = 0
        """Packs that nobody has seen."""
        self._at_s = setting.look_every_s
        """How far this has come: when the next look begins, or the current one goes on."""
        self._is_looking = False
        self._told = 0.0
        """Packs since the latest listing of the current look."""
        self.seen_s: list[float] = []
        """By burst: when others know of it."""
        self.seen_at: list[float] = []
        """By burst: `known_blocks` then."""
        self._seen_blocks = 0
        self._put_blocks = 0
        self._seen_packs = 0
        self._delays_s = 0.0

    @property
    def known_blocks(self) -> float:
        """Of how many blocks a host has come to know so far, in the mean: its own, and what others put."""
        hosts = self._setting.hosts
        return (self._put_blocks + self._seen_blocks * (hosts - 1)) / hosts

    def put(self, at_s: float, packs: int, blocks: int) -> int:
        """A burst of packs. Returns its number."""
        self.seen_s.append(NEVER)
        self.seen_at.append(NEVER)
        self._put_blocks += blocks
        self._landed.append((at_s, packs, blocks, len(self.seen_s) - 1))
        self._to_see += packs
        return len(self.seen_s) - 1

    def advance(self, now_s: float) -> None:
        """Looks until now: lists, then reads what has landed, also what lands meanwhile."""
        setting, counts = self._setting, self._counts
        others = (setting.hosts - 1) / setting.hosts
        while self._at_s <= now_s:
            if not self._is_looking:
                self._at_s += self._listed(self._at_s) * setting.list_s
                self._told = 0.0
                self._is_looking = True
            elif self._landed and self._landed[0][0] <= self._at_s:
                landed_s, packs, blocks, burst = self._landed.popleft()
                self._window.append((landed_s, packs))
                self._in_window += packs
                self._to_see -= packs
                counts.head_reads += packs * (setting.hosts - 1)
                self._at_s += packs * others * (setting.get_s / model.HEADS_AT_ONCE)
                self._told += packs * others
                while self._told > model.TOLD_AT_ONCE:
                    self._told -= model.TOLD_AT_ONCE
                    self._at_s += setting.list_s
                    counts.lists += setting.hosts
                self.seen_s[burst] = self._at_s
                self._seen_blocks += blocks
                self.seen_at[burst] = self.known_blocks
                self._seen_packs += packs
                self._delays_s += packs * (self._at_s - landed_s + model.LINGER_S / 2 + PUT_S)
            else:
                self._is_looking = False
                self._at_s += setting.look_every_s

    def _listed(self, now_s: float) -> int:
        """Listings for the names of the last ten minutes, known or not."""
        while self._window and self._window[0][0] < now_s - model.WINDOW_S:
            self._in_window -= self._window.popleft()[1]
        lists = model.lists_per_look(self._in_window + self._to_see)
        self._counts.lists += lists * self._setting.hosts
        return lists

    def finish(self, now_s: float) -> None:
        self.advance(now_s)
        self._counts.unknown_packs = self._to_see
        self._counts.known_after_s = self._delays_s / max(1, self._seen_packs)


@dataclass(slots=True)
class _Stored:
    """What the store has of a segment."""

    blocks: int
    burst: int
    host: int
    before: int
    """So many of its blocks were put earlier, and are known to all."""
    put_at: float
    """`known_blocks` when it was put."""


@dataclass(slots=True, eq=False)
class _Host:
    pool: OrderedDict[int, list[int]]
    """By segment: how many of its first blocks are there, and how many of them need not be put any more. The
    least recent first."""
    blocks: int = 0
    own: dict[int, int] = field(default_factory=dict)
    """By segment: how many blocks this host has put, though others had."""
    used: dict[int, float] = field(default_factory=dict)
    """By segment: `known_blocks` when this host last read it, or put it again."""
    gathering_s: float = -NEVER
    """When the pack that is not full yet was begun."""
    gathered: float = 0.0
    """Blocks in it."""
    tokens: int = 0
    """It was asked for so many."""

    def evict(self, most: int) -> None:
        """Has at most so many blocks stay: the ends of what was not used for longest go."""
        while self.blocks > most:
            segment, there = next(iter(self.pool.items()))
            gone = min(there[0], self.blocks - most)
            self.blocks -= gone
            if gone == there[0]:
                del self.pool[segment]
            else:
                there[0] -= gone
                there[1] = min(there)

    def gather(self, blocks: int, per_pack: float, now_s: float) -> int:
        """Puts blocks together with what waits for more. Returns how many packs are begun."""
        if now_s >= self.gathering_s + model.LINGER_S:
            self.gathered = 0.0
        was_open = self.gathered > 0
        whole, left = divmod(self.gathered + blocks, per_pack)
        if whole or not was_open:
            self.gathering_s = now_s
        self.gathered = left
        return int(whole) + (left > 0) - was_open


Put = tuple[int, int, int]
"""A segment, and from which to which of its blocks are put."""


class _Fleet:
    def __init__(self, requests: Requests, setting: Setting) -> None:
        self.counts = Counts()
        self.hosts = [_Host(OrderedDict()) for _ in range(setting.hosts)]
        self.follower = _Follower(setting, self.counts)
        self._setting = setting
        self._stored: dict[int, _Stored] = {}
        self._put_blocks = 0
        """Different blocks that were put so far."""

    def serve(self, number: int, path: list[int], lengths: list[int], now_s: float) -> tuple[int, int]:
        """One request for these segments at a host. Returns how many of its first blocks were in the host's
        pool, and how many after them it has thanks to the store."""
        self.follower.advance(now_s)
        host = self.hosts[number]
        to_put: list[Put] = []
        found = self._look_up(host, number, path, lengths, now_s, to_put)
        self._compute(host, number, path, lengths, now_s, to_put)
        host.evict(self._setting.pool_blocks)
        to_put = [each for each in to_put if each[1] < each[2]]
        if to_put:
            self._put(host, number, to_put, now_s)
        return found

    def _known(self, host: _Host, number: int, segment: int, now_s: float) -> int:
        """How many first blocks of a segment a host knows to be in the store."""
        found = self._stored.get(segment)
        if found is None:
            return 0
        is_own = found.host == number
        is_seen = self.follower.seen_s[found.burst] <= now_s
        if not (is_own or is_seen):
            return max(found.before, host.own.get(segment, 0))
        # What this host has not put, seen or read for so long is forgotten for what came since.
        latest = max(
            found.put_at if is_own else self.follower.seen_at[found.burst], host.used.get(segment, 0.0)
        )
        is_kept = self.follower.known_blocks - latest <= self._setting.remembered_blocks
        return found.blocks if is_kept else 0

    def _look_up(
        self, host: _Host, number: int, path: list[int], lengths: list[int], now_s: float, to_put: list[Put]
    ) -> tuple[int, int]:
        """Finds the first blocks of a prompt, reads what only the store has, and says what is to be put
        because it was found for the first time."""
        pool, counts = host.pool, self.counts
        is_on_reuse = self._setting.mode is PutMode.ON_REUSE
        in_host = in_store = 0
        read: dict[int, int] = {}
        for segment, length in zip(path, lengths, strict=True):
            there = pool.get(segment)
            resident, clean = there if there else (0, 0)
            is_first = is_on_reuse and clean < resident
            knows = self._known(host, number, segment, now_s) if is_first or resident < length else 0
            if is_first:
                to_put.append((segment, max(clean, knows), resident))
            if read:
                in_store += max(resident, knows)
            else:
                in_host += resident
                in_store += max(0, knows - resident)
            if knows > resident:
                host.used[segment] = self.follower.known_blocks
                host.blocks += knows - resident
                burst = self._stored[segment].burst
                read[burst] = read.get(burst, 0) + knows - resident
            reached = max(resident, knows)
            if reached:
                pool[segment] = [reached, reached]
            if reached < length:
                break
        for blocks in read.values():
            counts.read_blocks += blocks
            counts.packs_read += math.ceil(blocks / self._setting.blocks_per_pack)
        return in_host, in_store

    def _compute(
        self, host: _Host, number: int, path: list[int], lengths: list[int], now_s: float, to_put: list[Put]
    ) -> None:
        """Computes and stores what was missing. All of a prompt was used just now, its beginning last."""
        pool = host.pool
        is_through = self._setting.mode is PutMode.THROUGH
        for segment, length in zip(reversed(path), reversed(lengths), strict=True):
            there = pool.get(segment)
            if there is None:
                there = pool[segment] = [0, 0]
            else:
                pool.move_to_end(segment)
            if there[0] < length:
                if is_through:
                    begin = max(there[0], self._known(host, number, segment, now_s))
                    to_put.append((segment, begin, length))
                host.blocks += length - there[0]
                there[0] = length

    def _put(self, host: _Host, number: int, to_put: list[Put], now_s: float) -> None:
        counts = self.counts
        blocks = sum(end - begin for _, begin, end in to_put)
        counts.putting_requests += 1
        counts.put_blocks += blocks
        packs = host.gather(blocks, self._setting.blocks_per_pack, now_s)
        counts.puts += packs
        burst = self.follower.put(now_s + model.LINGER_S + PUT_S, packs, blocks)
        at = self.follower.known_blocks
        for segment, _, end in to_put:
            found = self._stored.get(segment)
            if found is None or found.blocks < end:
                before = found.blocks if found else 0
                self._put_blocks += end - before
                self._stored[segment] = _Stored(end, burst, number, before, at)
            elif found.host == number or self.follower.seen_s[found.burst] <= now_s:
                # It was forgotten; others that have forgotten it come to know of it again.
                self._stored[segment] = _Stored(found.blocks, burst, number, 0, at)
            else:
                host.own[segment] = max(end, host.own.get(segment, 0))

    def finish(self, seconds: float, tokens: int) -> Counts:
        self.follower.finish(seconds)
        self.counts.put_again_blocks = self.counts.put_blocks - self._put_blocks
        self.counts.busiest = max(host.tokens for host in self.hosts) * len(self.hosts) / max(1, tokens)
        return self.counts


def simulate(requests: Requests, setting: Setting, *, keep_hits: bool = False) -> Counts:
    """Replays requests on empty hosts with an empty store."""
    fleet = _Fleet(requests, setting)
    counts, parts = fleet.counts, requests.parts
    sizes, common = parts.blocks.tolist(), requests.common.tolist()
    lengths_of = [[sizes[segment] for segment in path] for path in parts.paths]
    tokens_of, block_tokens = parts.trace.tokens.tolist(), parts.trace.block_tokens
    arrays = (requests.arrival_s, requests.copy, requests.request, _hosts_of(requests, setting))
    for now_s, copy, request, number in zip(*(array.tolist() for array in arrays), strict=True):
        own = (copy + 1) * len(sizes)
        path = [segment if common[segment] else segment + own for segment in parts.paths[request]]
        in_host, in_store = fleet.serve(number, path, lengths_of[request], now_s)
        asked, tokens = sum(lengths_of[request]), tokens_of[request]
        at_host, both = (
            tokens if blocks == asked else min(tokens, blocks * block_tokens)
            for blocks in (in_host, in_host + in_store)
        )
        counts.requests += 1
        counts.tokens += tokens
        counts.asked_blocks += asked
        counts.host_hit_tokens += at_host
        counts.store_hit_tokens += both - at_host
        fleet.hosts[number].tokens += tokens
        if keep_hits:
            counts.hits.append(in_host + in_store)
    return fleet.finish(requests.seconds, counts.tokens)


def _hosts_of(requests: Requests, setting: Setting) -> I64:
    """By request: its host."""
    count = len(requests.request)
    if setting.router is Router.ROUND_ROBIN:
        return np.arange(count) % setting.hosts
    first = requests.first[requests.request]
    own = np.where(requests.common[first], 0, requests.copy + 1) * len(requests.parts.blocks) + first
    return (mixed(own.astype(np.uint64)) % np.uint64(setting.hosts)).astype(np.int64)
