"""A plain-Python block table with the interface of `kvtier_kernels.BlockTable`: dicts and lists.

Entry numbers are the same as the native table's too: the entry removed last is used again first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

NO_ENTRY = 0xFFFF_FFFF
NO_SLOT = 0
PINS_MAX = (1 << 20) - 1
WRITING, READY, EVICTING = 1, 2, 3
NAMES = {WRITING: "WRITING", READY: "READY", EVICTING: "EVICTING"}


@dataclass
class Block:
    """What the table knows of one live entry."""

    space: int
    hash: bytes
    domain: int
    flags: int
    state: int = WRITING
    pins: int = 0
    slots: list[int] = field(default_factory=list)

    @property
    def evictable(self) -> bool:
        return self.state == READY and self.pins == 0


class IndexPage:
    """The set that a page stands for, as counts."""

    def __init__(self) -> None:
        self.hashes: Counter[bytes] = Counter()
        self.is_complete = False

    def complete(self) -> None:
        self.is_complete = True

    def incomplete(self) -> None:
        self.is_complete = False


class PoolShadow:
    """Three caches that go by recency, as one list of everything that is asked for and stored: no sample.
    A block is in the first part (0, 1, 2) that fits half, once and twice of the pool, or in none (3)."""

    def __init__(self) -> None:
        self.recent: dict[tuple[int, bytes], tuple[int, int]] = {}
        """Bytes and part of each block, the most recent last."""
        self.counted = dict.fromkeys(("asked", "hit", "missed_half", "missed_now", "missed_twice"), 0.0)

    def begin(self, capacity_bytes: float, skipped_bytes: float) -> None:
        self.recent = {}
        self.skipped_bytes = skipped_bytes
        self.resize(capacity_bytes)

    def resize(self, capacity_bytes: float) -> None:
        self.limits = (capacity_bytes / 2, capacity_bytes, 2 * capacity_bytes)
        self.counted = dict.fromkeys(self.counted, 0.0)
        self.recent = {key: (block_bytes, 0) for key, (block_bytes, _) in self.recent.items()}
        self._settle()

    def asked(self, space: int, hashes: U8, block_bytes: int, hits: int) -> None:
        keys = [(space, each.tobytes()) for each in hashes]
        parts = [self.recent.get(key, (0, 3))[1] for key in keys]
        for key in reversed(keys):
            if key in self.recent:
                self._touch(key, block_bytes)
        self._settle()
        if self._skips(len(keys) * block_bytes):
            return
        self.counted["asked"] += len(keys)
        self.counted["hit"] += hits
        for size, name in enumerate(("missed_half", "missed_now", "missed_twice")):
            run = next((i for i, part in enumerate(parts) if part > size), len(parts))
            self.counted[name] += len(keys) - run

    def stored(self, space: int, hashes: U8, block_bytes: int) -> None:
        keys = [(space, each.tobytes()) for each in hashes]
        spared = bool(keys) and self.recent.get(keys[0], (0, 3))[1] > 1
        twice_only = 0
        for key in reversed(keys):
            twice_only += spared and self.recent.get(key, (0, 3))[1] == 2
            self._touch(key, block_bytes)
        self._settle()
        if self.skipped_bytes <= 0:
            self.counted["missed_twice"] -= twice_only

    def spared(self, blocks: int, block_bytes: int) -> None:
        if not self._skips(blocks * block_bytes):
            for name in ("asked", "missed_half", "missed_now", "missed_twice"):
                self.counted[name] += blocks

    def fade(self, kept: float) -> None:
        self.counted = {name: kept * value for name, value in self.counted.items()}

    def stats(self) -> dict[str, float]:
        return self.counted | {
            "sampled": self.counted["asked"], "share": 1.0, "blocks": len(self.recent), "bytes": 0.0
        }  # fmt: skip

    def _skips(self, asked_bytes: float) -> bool:
        skips = self.skipped_bytes > 0
        self.skipped_bytes = max(0.0, self.skipped_bytes - asked_bytes)
        return skips

    def _touch(self, key: tuple[int, bytes], block_bytes: int) -> None:
        known, _ = self.recent.pop(key, (block_bytes, 0))
        self.recent[key] = known, 0

    def _settle(self) -> None:
        for part, limit in enumerate(self.limits):
            held = sum(block_bytes for block_bytes, where in self.recent.values() if where <= part)
            for key, (block_bytes, where) in list(self.recent.items()):
                if held <= limit:
                    break
                if where != part:
                    continue
                held -= block_bytes
                if part == 2:
                    del self.recent[key]
                else:
                    self.recent[key] = block_bytes, part + 1


class HoldCounts:
    """Who holds which entries, as counts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.holders: Counter[int] = Counter()

    def add(self, entries: U32) -> int:
        held = len(+self._checked(entries))
        self.holders.update(entries.tolist())
        return len(+self.holders) - held

    def remove(self, entries: U32) -> int:
        held = len(+self._checked(entries))
        left = self.holders.copy()
        left.subtract(entries.tolist())
        if min(left.values(), default=0) < 0:
            raise ValueError("nobody holds an entry")
        self.holders = +left
        return held - len(self.holders)

    def of(self, entries: U32) -> U32:
        self._checked(entries)
        return np.array([self.holders[entry] for entry in entries.tolist()], np.uint32)

    def _checked(self, entries: U32) -> Counter[int]:
        array(entries, "entries", np.uint32, 1)
        if any(entry >= self.capacity for entry in entries.tolist()):
            raise ValueError("an entry is out of range")
        return self.holders


class BlockTable:
    def __init__(self, capacity: int, pool_pages: int, seed: int | None = None) -> None:
        if not 1 <= capacity <= 1 << 30:
            raise ValueError(f"capacity is {capacity}")
        if not 2 <= pool_pages <= 1 << 32:
            raise ValueError(f"pool_pages is {pool_pages}")
        self.capacity = capacity
        self.pool_pages = pool_pages
        self.blocks: dict[int, Block] = {}
        self.keys: dict[tuple[int, bytes], int] = {}
        self.slot_owners: dict[int, int] = {}
        self.recency: dict[int, list[int]] = {}  # domain -> evictable entries, least recent first
        self.free: list[int] = []
        self.generation: Counter[int] = Counter()
        self.used = 0
        self.pages: dict[int, tuple[IndexPage, int]] = {}
        """By space: its page, and the first entry that is not in it yet."""

    # --- pages for clients ---

    def publish(self, space: int, page: IndexPage) -> None:
        if space in self.pages:
            raise ValueError(f"space {space} has a page already")
        self.pages[space] = page, 0

    def publish_more(self, space: int, n: int) -> bool:
        if space not in self.pages:
            raise ValueError(f"space {space} has no page")
        page, seen = self.pages[space]
        for entry in range(seen, min(self.used, seen + n)):
            if entry in self.blocks and self.blocks[entry].space == space:
                page.hashes[self.blocks[entry].hash] += 1
        done = seen + n >= self.used
        self.pages[space] = page, 1 << 62 if done else seen + n
        return done

    def withdraw(self, space: int) -> None:
        if space not in self.pages:
            raise ValueError(f"space {space} has no page")
        del self.pages[space]

    def _publish(self, entry: int, change: int) -> None:
        block = self.blocks[entry]
        page, seen = self.pages.get(block.space, (None, 0))
        if page is not None and entry < seen:
            page.hashes[block.hash] += change

    # --- keys ---

    def lookup(self, space: int, hashes: U8) -> tuple[U32, U8]:
        entries = [self.keys.get((space, key), NO_ENTRY) for key in rows(hashes)]
        states = [self.blocks[entry].state if entry != NO_ENTRY else 0 for entry in entries]
        return np.array(entries, np.uint32), np.array(states, np.uint8)

    def lookup_prefix(self, space: int, hashes: U8) -> tuple[U32, int]:
        entries, states = self.lookup(space, hashes)
        for i, state in enumerate(states):
            if state != READY:
                return entries[:i], int(state)
        return entries, 0

    def insert(self, space: int, domain: int, hashes: U8, flags: int = 0) -> tuple[U32, U8]:
        entries, created = [], []
        for key in rows(hashes):
            if (space, key) in self.keys:
                entries.append(self.keys[space, key])
                created.append(0)
            elif len(self.blocks) == self.capacity:
                entries.append(NO_ENTRY)
                created.append(2)
            else:
                if self.free:
                    entry = self.free.pop()
                else:
                    entry = self.used
                    self.used += 1
                self.blocks[entry] = Block(space, key, domain, flags)
                self.keys[space, key] = entry
                self._publish(entry, 1)
                entries.append(entry)
                created.append(1)
        return np.array(entries, np.uint32), np.array(created, np.uint8)

    # --- slots ---

    def attach_slots(self, entries: U32, slots: U32) -> None:
        array(entries, "entries", np.uint32, 1)
        array(slots, "slots", np.uint32, 2)
        if len(slots) != len(entries):
            raise ValueError(f"slots has {len(slots)} rows, entries {len(entries)}")
        if slots.shape[1] == 0:
            raise ValueError("slots has rows of 0 elements")
        self._all(entries, self._only(WRITING), lambda b: "has its slots already" if b.slots else "")
        flat = slots.ravel().tolist()
        for slot in flat:
            self._slot(slot)
            if slot in self.slot_owners or flat.count(slot) > 1:
                raise ValueError(f"slot {slot} is taken")
        for entry, row in zip(entries.tolist(), slots.tolist(), strict=True):
            self.blocks[entry].slots = row
            self.slot_owners.update(dict.fromkeys(row, entry))

    def slots(self, entries: U32, world: int) -> U32:
        if world == 0:
            raise ValueError("world is 0")
        out = []
        for block in self._blocks(entries):
            if block.slots and len(block.slots) != world:
                raise ValueError(f"an entry has {len(block.slots)} slots, world is {world}")
            out.append(block.slots or [NO_SLOT] * world)
        return np.array(out, np.uint32).reshape(len(out), world)

    def owners(self, slots: U32) -> U32:
        array(slots, "slots", np.uint32, 1)
        for slot in slots.tolist():
            self._slot(slot)
        return np.array([self.slot_owners.get(slot, NO_ENTRY) for slot in slots.tolist()], np.uint32)

    def _slot(self, slot: int) -> None:
        if not 0 < slot < self.pool_pages:
            raise ValueError(f"slot {slot} is not a page of the pool")

    # --- states ---

    def commit(self, entries: U32) -> None:
        self._all(entries, self._only(WRITING))
        for entry in entries.tolist():
            self.blocks[entry].state = READY
            self._newest(entry)

    def begin_evict(self, entries: U32) -> None:
        self._all(entries, self._only(READY), lambda b: "has pins" if b.pins else "")
        for entry in entries.tolist():
            self._forget(entry)
            self.blocks[entry].state = EVICTING

    def condemn(self, entries: U32) -> None:
        self._all(entries, self._only(READY))
        for entry in entries.tolist():
            self._forget(entry)
            self.blocks[entry].state = EVICTING

    def remove(self, entries: U32) -> None:
        self._all(entries, self._only(WRITING, EVICTING), lambda b: "has pins" if b.pins else "")
        for entry in entries.tolist():
            self._publish(entry, -1)
            block = self.blocks.pop(entry)
            del self.keys[block.space, block.hash]
            for slot in block.slots:
                del self.slot_owners[slot]
            self.generation[entry] += 1
            self.free.append(entry)

    def pin(self, entries: U32) -> None:
        self._blocks(entries)
        for entry, times in Counter(entries.tolist()).items():
            if self.blocks[entry].pins + times > PINS_MAX:
                raise ValueError(f"entry {entry} would have more than {PINS_MAX} pins")
        for entry in entries.tolist():
            self._forget(entry)
            self.blocks[entry].pins += 1

    def unpin(self, entries: U32) -> None:
        self._blocks(entries)
        for entry, times in Counter(entries.tolist()).items():
            if self.blocks[entry].pins < times:
                raise ValueError(f"entry {entry} has {self.blocks[entry].pins} pins, not {times}")
        for entry in entries.tolist():
            self.blocks[entry].pins -= 1
            self._newest(entry)

    def touch(self, entries: U32) -> None:
        self._blocks(entries)
        for entry in entries.tolist():
            self._forget(entry)
            self._newest(entry)

    def cool(self, entries: U32) -> None:
        self._blocks(entries)
        for entry in entries.tolist():
            block = self.blocks[entry]
            if block.evictable:
                self._forget(entry)
                self.recency[block.domain].insert(0, entry)

    def victims(self, domain: int, n: int) -> U32:
        return np.array(self.recency.get(domain, [])[:n], np.uint32)

    ranks = False

    def rank(self, history_blocks: int) -> None:
        raise NotImplementedError("the oracle goes by recency")

    def stop_ranking(self) -> None:
        pass

    def learnt(self) -> bytes:
        return b""

    def restore_learnt(self, saved: bytes) -> bool:
        return False

    def rank_below(self, above: object) -> None:
        raise NotImplementedError("the oracle goes by recency")

    def asked(self, space: int, domain: int, hashes: U8, below: Sequence[object] = ()) -> None:
        pass

    def asked_each(self, entries: U32, below: Sequence[object] = ()) -> None:
        pass

    def same_as(self, entries: U32, above: object, of: U32) -> None:
        pass

    def chained(self, entries: U32) -> None:
        pass

    def admitted(self, domain: int, entries: U32, free: int) -> int:
        return len(entries)

    def admitted_of(self, domain: int, above: object, entries: U32, free: int) -> int:
        return len(entries)

    def coldest(self, domain: int, n: int, without_flags: int, horizon: int) -> U32:
        victims = self.recency.get(domain, [])[:horizon]
        cold = [entry for entry in victims if not self.blocks[entry].flags & without_flags]
        return np.array(cold[:n], np.uint32)

    def evictable(self, domain: int) -> int:
        return len(self.recency.get(domain, []))

    def _newest(self, entry: int) -> None:
        block = self.blocks[entry]
        if block.evictable:
            self.recency.setdefault(block.domain, []).append(entry)

    def _forget(self, entry: int) -> None:
        block = self.blocks[entry]
        if block.evictable:
            self.recency[block.domain].remove(entry)

    # --- fields ---

    def states(self, entries: U32) -> U8:
        return np.array([block.state for block in self._blocks(entries)], np.uint8)

    def pins(self, entries: U32) -> U32:
        return np.array([block.pins for block in self._blocks(entries)], np.uint32)

    def flags(self, entries: U32) -> U16:
        return np.array([block.flags for block in self._blocks(entries)], np.uint16)

    def set_flags(self, entries: U32, flags: int) -> None:
        for block in self._blocks(entries):
            block.flags |= flags

    def clear_flags(self, entries: U32, flags: int) -> None:
        for block in self._blocks(entries):
            block.flags &= ~flags

    def hashes(self, entries: U32) -> U8:
        joined = b"".join(block.hash for block in self._blocks(entries))
        return np.frombuffer(joined, np.uint8).reshape(-1, 32).copy()

    def spaces(self, entries: U32) -> U32:
        return np.array([block.space for block in self._blocks(entries)], np.uint32)

    def domains(self, entries: U32) -> U16:
        return np.array([block.domain for block in self._blocks(entries)], np.uint16)

    def generations(self, entries: U32) -> U32:
        self._blocks(entries)
        return np.array([self.generation[entry] for entry in entries.tolist()], np.uint32)

    # --- the whole ---

    def shadow(self, blocks: int) -> PoolShadow:
        return PoolShadow()

    def hold_counts(self) -> HoldCounts:
        return HoldCounts(self.capacity)

    def count(self, space: int) -> int:
        return sum(block.space == space for block in self.blocks.values())

    def entries_of(self, space: int) -> U32:
        return np.array(sorted(e for e, block in self.blocks.items() if block.space == space), np.uint32)

    def ready_among(self, space: int, first: int, n: int) -> tuple[U32, int]:
        entries = self.entries_of(space)
        following = self.capacity if not len(entries) or first + n >= self.used else first + n
        entries = entries[(entries >= first) & (entries < first + n)]
        return entries[self.states(entries) == READY], following

    def stats(self) -> dict[str, Any]:
        states = Counter(block.state for block in self.blocks.values())
        return {
            "writing": states[WRITING],
            "ready": states[READY],
            "evicting": states[EVICTING],
            "capacity": self.capacity,
            "bytes": 0,
            "domains": dict(Counter(block.domain for block in self.blocks.values())),
        }

    def dump(self) -> dict[str, npt.NDArray[Any]]:
        entries = np.array(sorted(self.blocks), np.uint32)
        own = [self.blocks[entry].slots for entry in entries.tolist()]
        return {
            "entries": entries,
            "spaces": self.spaces(entries),
            "hashes": self.hashes(entries),
            "states": self.states(entries),
            "flags": self.flags(entries),
            "pins": self.pins(entries),
            "domains": self.domains(entries),
            "generations": self.generations(entries),
            "slot_counts": np.array([len(slots) for slots in own], np.uint32),
            "slots": np.array([slot for slots in own for slot in slots], np.uint32),
        }

    def check(self) -> None:
        assert len(self.keys) == len(self.blocks) <= self.capacity
        for entry, block in self.blocks.items():
            assert self.keys[block.space, block.hash] == entry
            assert all(self.slot_owners[slot] == entry for slot in block.slots)
            assert self.recency.get(block.domain, []).count(entry) == block.evictable
        assert len(self.slot_owners) == sum(len(block.slots) for block in self.blocks.values())
        assert sum(map(len, self.recency.values())) == sum(block.evictable for block in self.blocks.values())

    # --- checking batches ---

    def _blocks(self, entries: U32) -> list[Block]:
        """The blocks of entries, all live; the batch may name one twice."""
        array(entries, "entries", np.uint32, 1)
        for i, entry in enumerate(entries.tolist()):
            if entry not in self.blocks:
                raise ValueError(f"entries[{i}] is {entry}, which is not an entry of the table")
        return [self.blocks[entry] for entry in entries.tolist()]

    def _all(self, entries: U32, *problems: Callable[[Block], str]) -> None:
        """Refuses the batch if it names an entry twice or one of `problems` says something about a block."""
        blocks = self._blocks(entries)
        if len(set(entries.tolist())) != len(entries):
            raise ValueError("the batch names an entry twice")
        for i, block in enumerate(blocks):
            for problem in problems:
                if text := problem(block):
                    raise ValueError(f"entries[{i}] is {entries[i]}, which {text}")

    @staticmethod
    def _only(*states: int) -> Callable[[Block], str]:
        return lambda block: "" if block.state in states else f"is {NAMES[block.state]}"


def array(value: npt.NDArray[Any], name: str, dtype: type, dims: int) -> None:
    """Refuses what the native table refuses: another dtype, number of dimensions, or gaps."""
    if value.dtype != dtype or value.ndim != dims or not value.flags.c_contiguous:
        raise ValueError(f"{name} is {value.dtype}, {value.shape}; expected {dims}-d {dtype.__name__}")


def rows(hashes: U8) -> Iterable[bytes]:
    array(hashes, "hashes", np.uint8, 2)
    if hashes.shape[1] != 32:
        raise ValueError(f"hashes has rows of {hashes.shape[1]} elements; expected 32")
    return [row.tobytes() for row in hashes]
