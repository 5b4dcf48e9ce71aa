"""A pool that performs the core's actions on slots, refuses what the real records would refuse, and can be
scanned."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from kvtierd.core.actions import AssignExtent, CommitSlots, FreeSlots, OpenSlots, QuarantineSlots
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES, NamespaceDigest
from kvtierd.core.stimuli import Recovered, RecoveredExtent

FREE, WRITING, READY = 0, 1, 2
TORN = "torn"
NOBODY = -1
"""Writer of a slot that was set aside."""

Key = tuple[bytes, int, bytes]
"""Namespace digest, group, hash."""


@dataclass(slots=True)
class Slot:
    """One record, and what the slot's bytes are."""

    slot_bytes: int
    generation: int
    state: int = FREE
    key: Key | None = None
    shard: int = 0
    world: int = 0
    store: tuple[int, int] = (0, 0)
    writer: int = 0
    clock: int = 0
    content: Any = TORN
    sum: Any = TORN
    """What the data checksum in the record says the content is."""
    rot: str = ""
    """"record": every load notices. "data": only one that verifies the checksum does."""


class FakePool:
    """Survives daemons; counts its boots."""

    def __init__(self, geometry: PoolGeometry, *, rots_below: bool = False) -> None:
        """`rots_below`: it holds records only; what rots is the data on a disk."""
        self.geometry = geometry
        self.rots_below = rots_below
        self.boot = 0
        self.extents: dict[int, int] = {}
        self.populated = geometry.extents
        """How many extents, from the first on, have memory."""
        self.slots: dict[int, Slot] = {}
        pages = (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES
        self.states = np.zeros(pages, np.uint8)
        """State of every slot by its number; FREE where there is none."""
        self.by_key: dict[Key, set[int]] = {}

    # --- actions ---

    def assign(self, action: AssignExtent) -> None:
        assert action.extent < self.populated, f"extent {action.extent} is used without memory"
        generation = 0
        old = self.extents.get(action.extent)
        if old is not None:
            for number in self.geometry.slots_of(action.extent, old).tolist():
                slot = self.slots.pop(number)
                assert slot.state == FREE, f"extent {action.extent} is taken while slot {number} is in use"
                generation = max(generation, slot.generation + 1)
        self.extents[action.extent] = action.slot_bytes
        for number in self.geometry.slots_of(action.extent, action.slot_bytes).tolist():
            self.slots[number] = Slot(action.slot_bytes, generation)

    def open(self, action: OpenSlots) -> None:
        for number, row in zip(action.slots.tolist(), action.hashes, strict=True):
            slot = self.slots[number]
            assert slot.state == FREE, f"slot {number} is opened while it is in use"
            assert action.data_bytes <= slot.slot_bytes, f"slot {number} is too small"
            slot.state = WRITING
            slot.generation += 1
            slot.key = (action.namespace, action.group, row.tobytes())
            slot.shard, slot.world = action.shard, action.world_size
            slot.store = (self.boot, action.store)
            slot.writer = action.worker
            slot.content, slot.sum, slot.rot = TORN, TORN, ""
            self.states[number] = WRITING
            self.by_key.setdefault(slot.key, set()).add(number)

    def commit(self, action: CommitSlots, only: int | None = None) -> None:
        """`only`: the crash comes after so many slots."""
        assert action.slots.ndim == 2
        flat = action.slots.reshape(-1).tolist()
        for i, number in enumerate(flat[:only]):
            slot = self.slots[number]
            assert slot.state == WRITING, f"slot {number} is committed and was not being written"
            slot.state = READY
            slot.clock = action.first_clock - i // action.slots.shape[1]
            self.states[number] = READY

    def make_ready(self, numbers: list[int], clocks: list[int]) -> None:
        """What a disk's worker does in the image it shares with the front."""
        for number, clock in zip(numbers, clocks, strict=True):
            slot = self.slots[number]
            assert slot.state == WRITING
            slot.state, slot.clock = READY, clock
            self.states[number] = READY

    def free(self, action: FreeSlots) -> None:
        for number in action.slots.tolist():
            assert self.slots[number].state != FREE, f"slot {number} is freed twice"
            self._free(number)

    def set_aside(self, action: QuarantineSlots) -> None:
        for number in action.slots.tolist():
            slot = self.slots[number]
            assert slot.rot or self.rots_below, f"slot {number} is set aside, and nothing is wrong with it"
            self._free(number)
            slot.state, slot.writer = WRITING, NOBODY
            slot.generation += 1
            self.states[number] = WRITING

    def _free(self, number: int) -> None:
        self._forget_key(number)
        slot = self.slots[number]
        slot.state = FREE
        slot.generation += 1
        self.states[number] = FREE

    def _forget_key(self, number: int) -> None:
        slot = self.slots[number]
        if slot.key is not None:
            self.by_key[slot.key].discard(number)
            if not self.by_key[slot.key]:
                del self.by_key[slot.key]
            slot.key = None

    # --- questions ---

    def state_of(self, key: Key) -> int:
        """READY if every shard is, WRITING if every shard is, FREE if there is none; anything else is a
        bug."""
        own = self.by_key.get(key)
        if not own:
            return FREE
        slots = [self.slots[number] for number in own]
        assert {slot.shard for slot in slots} == set(range(slots[0].world)), f"shards of {key} are missing"
        assert len(own) == slots[0].world, f"{key} is there twice"
        states = {slot.state for slot in slots}
        assert len(states) == 1, f"shards of {key} are in different states"
        return states.pop()

    def holds(self, number: int, generation: int) -> bool:
        """Whether a slot still is what it was when it had this generation."""
        slot = self.slots.get(number)
        return slot is not None and slot.generation == generation

    def is_rotten(self, number: int, generation: int) -> bool:
        """What a look at record and data shows of a slot that holds what it held."""
        return self.holds(number, generation) and bool(self.slots[number].rot)

    # --- the next daemon ---

    def recover(self, random: Random) -> Recovered:
        """What a scan finds. Some writers of WRITING slots cannot be proved gone yet."""
        self.boot += 1
        unproven = {slot.writer for slot in self.slots.values() if random.random() < 0.5} - {NOBODY}
        whole: list[tuple[int, Key, list[int]]] = []
        quarantined = [
            n for n, slot in self.slots.items() if slot.state == WRITING and slot.writer in unproven
        ]
        corrupt = [n for n, slot in self.slots.items() if slot.state == WRITING and slot.writer == NOBODY]
        for number in [number for number, slot in self.slots.items() if slot.state == WRITING]:
            if number in corrupt:
                continue
            if number in quarantined:
                self._forget_key(number)
            else:
                self._free(number)
        for key, own in list(self.by_key.items()):
            stores: dict[tuple[int, int], dict[int, int]] = {}
            for number in sorted(own):
                slot = self.slots[number]
                if slot.rot != "record":
                    stores.setdefault(slot.store, {})[slot.shard] = number
                else:
                    self._free(number)
            for shards in stores.values():
                numbers = [shards[shard] for shard in sorted(shards)]
                first = self.slots[numbers[0]]
                if sorted(shards) == list(range(first.world)):
                    whole.append((first.clock, key, numbers))
                else:
                    for number in numbers:
                        self._free(number)
        whole.sort(key=lambda block: block[0])
        names = sorted({(key[0], key[1], len(numbers)) for _, key, numbers in whole})
        index = {name: i for i, name in enumerate(names)}
        return Recovered(
            extents=tuple(RecoveredExtent(extent, size) for extent, size in sorted(self.extents.items())),
            namespaces=tuple((NamespaceDigest(digest), group, world) for digest, group, world in names),
            spaces=np.array([index[key[0], key[1], len(own)] for _, key, own in whole], np.uint32),
            hashes=np.frombuffer(b"".join(key[2] for _, key, _ in whole), np.uint8).reshape(-1, 32),
            slots=np.array([number for _, _, own in whole for number in own], np.uint32),
            clock=max((clock for clock, _, _ in whole), default=0),
            quarantined=np.array(sorted(quarantined), np.uint32),
            corrupt=np.array(sorted(corrupt), np.uint32),
        )

    def rot(self, random: Random, kind: str) -> bool:
        """Spoils one READY slot; False if there is none."""
        ready = [slot for slot in self.slots.values() if slot.state == READY and not slot.rot]
        if not ready:
            return False
        slot = random.choice(ready)
        slot.rot = kind
        slot.content = "rotten"
        return True


def generation_of(pool: FakePool, numbers: np.ndarray) -> list[int]:
    """What the front reads before it posts a part."""
    return [pool.slots[number].generation for number in numbers.tolist()]
