"""What a device plan describes, carried out byte by byte, is what the CPU's plan copies, in no more steps."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_kernels import PAGE_BYTES, CopyPlan, DevicePlan

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

DEVICE = 0x7F3A_0000_0000
POOL = 0x7E11_2233_4000
PITCH_MAX = 2**31 - 1


def u32(*values: int) -> U32:
    return np.array(values, np.uint32)


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


@dataclass(frozen=True)
class Run:
    """A stretch of bytes on both sides, as offsets of the two memories."""

    device: int
    host: int
    size: int


@dataclass
class Case:
    """Device memory, a pool, and which blocks go with which slots."""

    memory: U8
    pool: U8
    bases: list[int]
    strides: list[int]
    sizes: list[int]
    num_blocks: int
    block_ids: U32
    slots: U32
    to_device: bool
    ranges: list[int] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)

    def plan(self) -> DevicePlan:
        bases = np.array(self.bases, np.uint64) + np.uint64(DEVICE)
        ranges = u32(*self.ranges) if self.ranges else None
        return DevicePlan(bases, u64(*self.strides), u64(*self.sizes), self.num_blocks, ranges)

    def arguments(self) -> dict[str, Any]:
        return {
            "block_ids": self.block_ids,
            "pool_address": POOL,
            "pool_bytes": len(self.pool),
            "slots": self.slots,
            "to_device": self.to_device,
            "borders": u64(*self.borders) if self.borders else None,
        }

    def runs(self) -> list[Run]:
        device, host, sizes = self.plan().describe(**self.arguments())
        return [
            Run(d - DEVICE, h - POOL, n)
            for d, h, n in zip(device.tolist(), host.tolist(), sizes.tolist(), strict=True)
        ]

    def rows(self) -> list[list[Run]]:
        """The runs of each two-dimensional copy."""
        copies = []
        columns = [array.tolist() for array in self.plan().describe_rows(**self.arguments())]
        for device, host, width, rows, device_pitch, host_pitch in zip(*columns, strict=True):
            assert rows >= 1
            assert width <= device_pitch <= PITCH_MAX
            assert width <= host_pitch <= PITCH_MAX
            if rows == 1:
                assert device_pitch == host_pitch == width
            copies.append(
                [
                    Run(device - DEVICE + row * device_pitch, host - POOL + row * host_pitch, width)
                    for row in range(rows)
                ]
            )
        return copies

    def carried_out(self, runs: Iterator[Run]) -> tuple[U8, U8]:
        """Memory and pool after these runs, each byte of a target written once."""
        memory, pool = self.memory.copy(), self.pool.copy()
        written = np.zeros(len(memory if self.to_device else pool), bool)
        for run in runs:
            on_device = slice(run.device, run.device + run.size)
            on_host = slice(run.host, run.host + run.size)
            target = on_device if self.to_device else on_host
            assert not written[target].any()
            written[target] = True
            if self.to_device:
                memory[on_device] = self.pool[on_host]
            else:
                pool[on_host] = self.memory[on_device]
        return memory, pool

    def copied(self) -> tuple[U8, U8]:
        """Memory and pool after the CPU's copy of the same blocks."""
        memory, pool = self.memory.copy(), self.pool.copy()
        plan = CopyPlan(memory, u64(*self.bases), u64(*self.strides), u64(*self.sizes), self.num_blocks)
        if self.to_device:
            plan.scatter(self.block_ids, pool, self.slots)
        else:
            plan.gather(self.block_ids, pool, self.slots)
        return memory, pool

    def range_of(self, offset: int) -> int:
        """The range of the plane that has this byte of device memory."""
        for plane, (base, stride, size) in enumerate(zip(self.bases, self.strides, self.sizes, strict=True)):
            if (
                base <= offset < base + stride * (self.num_blocks - 1) + size
                and (offset - base) % stride < size
            ):
                return self.ranges[plane] if self.ranges else 0
        raise AssertionError(f"byte {offset} belongs to no plane")

    def region_of(self, offset: int) -> int:
        return sum(border <= offset for border in self.borders)

    def place(self, device: int, host: int) -> tuple[int, int]:
        return self.range_of(device), self.region_of(host)


@st.composite
def orders(draw: st.DrawFn, values: list[int], count: int) -> list[int]:
    """`count` of the values: rising, falling, in runs, or anyhow."""
    kind = draw(st.sampled_from(["rising", "falling", "runs", "anyhow"]))
    if kind == "anyhow":
        return draw(st.permutations(values))[:count]
    start = draw(st.integers(0, len(values) - count))
    chosen = values[start : start + count]
    if kind == "falling":
        return chosen[::-1]
    if kind == "runs" and count:
        cuts = sorted(draw(st.sets(st.integers(0, count), max_size=3)))
        pieces = [chosen[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
        return [value for piece in draw(st.permutations(pieces)) for value in piece]
    return chosen


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Planes apart, interleaved block by block, or one plane across layers; slots that touch or do not."""
    num_blocks = draw(st.integers(1, 9))
    layout = draw(st.sampled_from(["apart", "interleaved", "whole"]))
    if layout == "whole":
        sizes = [PAGE_BYTES * draw(st.integers(1, 2)) - draw(st.sampled_from([0, 0, 1]))]
    else:
        size = st.sampled_from([1024, 1024, 2048, 4096, 100])
        alike = draw(st.booleans())
        sizes = (
            [draw(size)] * draw(st.integers(1, 5)) if alike else draw(st.lists(size, min_size=1, max_size=5))
        )
    gap, offset = draw(st.sampled_from([0, 0, 0, 64, 77])), draw(st.integers(0, 5))
    if layout == "interleaved":
        strides = [sum(sizes) + gap] * len(sizes)
        bases = [offset + sum(sizes[:p]) for p in range(len(sizes))]
        memory_bytes = offset + num_blocks * strides[0]
    else:
        strides = [size + gap for size in sizes]
        bases = [offset + num_blocks * sum(strides[:p]) for p in range(len(sizes))]
        memory_bytes = offset + num_blocks * sum(strides)
    order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else range(len(sizes))
    bases, strides, sizes = ([values[p] for p in order] for values in (bases, strides, sizes))

    pages = -(-sum(sizes) // PAGE_BYTES)
    all_slots = [1 + pages * place for place in range(num_blocks + 2)]
    to_device = draw(st.booleans())
    count = draw(st.integers(0, num_blocks))
    block_ids = draw(orders(list(range(num_blocks)), count))
    slots = draw(orders(all_slots, count))
    if count and draw(st.booleans()):  # what is only read may come several times
        again = draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
        if to_device:
            slots = [slots[i] for i in again]
        else:
            block_ids = [block_ids[i] for i in again]
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return Case(
        memory=random.integers(0, 256, memory_bytes, dtype=np.uint8),
        pool=random.integers(0, 256, (1 + pages * (num_blocks + 2)) * PAGE_BYTES, dtype=np.uint8),
        bases=bases,
        strides=strides,
        sizes=sizes,
        num_blocks=num_blocks,
        block_ids=u32(*block_ids),
        slots=u32(*slots),
        to_device=to_device,
        ranges=draw(st.one_of(st.just([]), st.lists(st.integers(0, 1), min_size=5, max_size=5)))[
            : len(sizes)
        ],
        borders=sorted(slot * PAGE_BYTES for slot in draw(st.sets(st.sampled_from(all_slots), max_size=2))),
    )


@settings(max_examples=400, deadline=None)
@given(cases())
def test_the_runs_described_are_what_the_cpu_copies(case: Case) -> None:
    runs = case.runs()
    for side, expected in zip(case.carried_out(iter(runs)), case.copied(), strict=True):
        assert (side == expected).all()
    assert sum(run.size for run in runs) == len(case.block_ids) * case.plan().slot_bytes


@settings(max_examples=400, deadline=None)
@given(cases())
def test_no_two_runs_could_be_one(case: Case) -> None:
    runs = case.runs()
    begins = {(run.device, run.host) for run in runs}
    for run in runs:
        after = run.device + run.size, run.host + run.size
        if after in begins:
            assert case.place(*after) != case.place(after[0] - 1, after[1] - 1)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_no_copy_touches_two_ranges_or_crosses_a_border(case: Case) -> None:
    for copy in [*([run] for run in case.runs()), *case.rows()]:
        ends = {(run.device + at, run.host + at) for run in copy for at in (0, run.size - 1)}
        assert len({case.place(*end) for end in ends}) == 1


@settings(max_examples=400, deadline=None)
@given(cases())
def test_two_dimensional_copies_copy_the_same_and_are_no_more(case: Case) -> None:
    copies = case.rows()
    runs = (run for copy in copies for run in copy)
    for side, expected in zip(case.carried_out(runs), case.copied(), strict=True):
        assert (side == expected).all()
    assert len(copies) <= len(case.runs())


def layers_apart(blocks: int, slots: U32, ids: U32, layers: int = 4, size: int = 1024) -> Case:
    return Case(
        memory=np.zeros(layers * blocks * size, np.uint8),
        pool=np.zeros((2 + int(slots.max())) * PAGE_BYTES, np.uint8),
        bases=[layer * blocks * size for layer in range(layers)],
        strides=[size] * layers,
        sizes=[size] * layers,
        num_blocks=blocks,
        block_ids=ids,
        slots=slots,
        to_device=False,
    )


def test_blocks_across_layers_in_neighbouring_slots_are_one_copy_in_any_order() -> None:
    order = np.random.default_rng(3).permutation(2000).astype(np.uint32)
    for ids in (np.arange(2000, dtype=np.uint32), np.arange(2000, dtype=np.uint32)[::-1].copy(), order):
        case = layers_apart(2000, 1 + ids, ids, layers=1, size=PAGE_BYTES)
        assert case.runs() == [Run(0, PAGE_BYTES, 2000 * PAGE_BYTES)]
        assert case.rows() == [[Run(0, PAGE_BYTES, 2000 * PAGE_BYTES)]]


def test_slots_that_come_twice_continue_in_the_block_that_follows() -> None:
    case = layers_apart(16, u32(1, 1, 2, 2), u32(8, 0, 1, 9), layers=1, size=PAGE_BYTES)
    case.to_device = True
    expected = {Run(0, PAGE_BYTES, 2 * PAGE_BYTES), Run(8 * PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES)}
    assert set(case.runs()) == expected


def test_layers_apart_are_one_copy_for_each_block_with_the_layers_as_rows() -> None:
    scattered = layers_apart(64, u32(9, 4, 1), u32(7, 50, 20))
    assert len(scattered.runs()) == 12
    assert [len(copy) for copy in scattered.rows()] == [4, 4, 4]


def test_a_run_of_blocks_is_one_copy_for_each_layer_with_the_blocks_as_rows() -> None:
    case = layers_apart(64, np.arange(1, 41, dtype=np.uint32), np.arange(10, 50, dtype=np.uint32))
    assert [len(copy) for copy in case.rows()] == [40, 40, 40, 40]


def test_layers_further_apart_than_a_driver_accepts_are_copies_of_their_own() -> None:
    case = layers_apart(1, u32(1), u32(0), layers=2)
    for distance, copies in ((PITCH_MAX, 1), (PITCH_MAX + 1, 2)):
        case.bases = [0, distance]
        assert len(case.rows()) == copies


def test_a_batch_of_nothing_is_no_copy() -> None:
    case = layers_apart(3, u32(1), u32(0))
    case.slots, case.block_ids = u32(), u32()
    assert case.runs() == []
    assert case.rows() == []


def test_a_plan_says_what_it_is_of() -> None:
    plan = layers_apart(3, u32(1), u32(0)).plan()
    assert (plan.slot_bytes, plan.num_blocks, plan.planes) == (4096, 3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": u32(0, 3)}, "block_ids[1] is 3; the engine has 3 blocks"),
        ({"slots": u32(1, 0)}, "slots[1] is 0: a slot of 5600 bytes is not inside the pool of 28672"),
        ({"slots": u32(1, 6)}, "slots[1] is 6: a slot of 5600 bytes is not inside the pool of 28672"),
        ({"slots": u32(1, 0xFFFF_FFFF)}, "slots[1] is 4294967295: a slot of 5600 bytes is not"),
        ({"slots": u32(4, 3)}, "slots[0] is 4, which overlaps slots[1], 3"),
        ({"slots": u32(4, 3), "to_device": True}, "slots[0] is 4, which overlaps slots[1], 3"),
        ({"slots": u32(3, 3)}, "slots[1] is 3, which overlaps slots[0], 3"),
        ({"block_ids": u32(1, 1), "to_device": True}, "block_ids[1] is 1, which repeats block_ids[0], 1"),
        ({"slots": u32(1)}, "slots has 1 elements; expected 2, one for each of block_ids"),
        ({"slots": u64(1, 3)}, "slots has elements of format 'L' and 8 bytes; expected uint32"),
        ({"block_ids": u32(1, 2).reshape(2, 1)}, "block_ids has 2 dimensions; expected 1"),
        ({"pool_address": 0}, "pool_address is 0: a pool of 28672 bytes cannot lie there"),
        ({"pool_bytes": 2**64 - 1}, f"pool_address is {POOL}: a pool of {2**64 - 1} bytes cannot lie there"),
        ({"borders": u64(4096, 4096)}, "borders[1] is 4096, not more than borders[0], 4096"),
        (
            {"borders": u64(4096, 5 * 4096 + 5599)},
            "slots[1] is 5: borders[1], 26079, lies inside its 5600 bytes",
        ),
    ],
)
@pytest.mark.parametrize("call", ["describe", "describe_rows"])
def test_a_batch_that_is_wrong_is_refused_by_name(change: dict[str, Any], message: str, call: str) -> None:
    plan = DevicePlan(u64(DEVICE, DEVICE + 2000), u64(600, 6000), u64(600, 5000), 3)
    arguments = {
        "block_ids": u32(2, 0),
        "pool_address": POOL,
        "pool_bytes": 7 * PAGE_BYTES,
        "slots": u32(1, 5),
    }
    assert len(getattr(plan, call)(**arguments)[0]) > 0
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(plan, call)(**arguments | change)


def test_borders_may_lie_at_a_slots_ends() -> None:
    plan = DevicePlan(u64(DEVICE), u64(4096), u64(4096), 3)
    borders = u64(0, 4096, 8192, 1 << 40)
    device, _, _ = plan.describe(u32(0, 1, 2), POOL, 1 << 20, u32(1, 2, 3), borders=borders)
    assert device.tolist() == [DEVICE, DEVICE + 4096]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [64], [64], 2), "bases[0] is 0, which is no address"),
        (([64, 128], [64, 64], [64, 65], 2), "block_strides[1] is 64, less than fragment_bytes[1], 65"),
        (([64], [64], [0], 1), "fragment_bytes[0] is 0"),
        (
            ([2**64 - 64], [64], [64], 2),
            "block_strides[0] is 64: block 1 would begin beyond the address",
        ),
        (
            ([2**64 - 64], [64], [64], 1),
            "fragment_bytes[0] is 64: block 0 would end beyond the address",
        ),
        (([64], [1 << 62], [8], 5), f"block_strides[0] is {1 << 62}: block 4 would begin beyond the address"),
        (([64], [64], [64], 0), "num_blocks is 0; expected 1 to 2^32"),
        (([], [], [], 1), "bases names 0 planes; expected 1 to 65536"),
        (([64, 128], [64], [64, 64], 1), "block_strides has 1 rows; expected 2, one for each of bases"),
    ],
)
def test_planes_that_cannot_be_addressed_are_refused_by_name(
    arguments: tuple[list[int], list[int], list[int], int], message: str
) -> None:
    bases, strides, fragment_bytes, num_blocks = arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        DevicePlan(u64(*bases), u64(*strides), u64(*fragment_bytes), num_blocks)


@pytest.mark.parametrize(("ranges", "said"), [(u32(), "0"), (u32(1), "1"), (u32(1, 1, 1), "3")])
def test_ranges_are_one_for_each_plane(ranges: U32, said: str) -> None:
    with pytest.raises(ValueError, match=f"ranges has {said} elements; expected .*one for each of bases"):
        DevicePlan(u64(64, 128), u64(64, 64), u64(64, 64), 1, ranges)
