"""Why a hash misses, in every way it can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import WorkerId
from kvtierd.core.maintenance.explain import ELSEWHERE_MAX, BlockVerdict, Explanation
from kvtierd.core.stimuli import EndSession, PartOutcome, SessionReleased, SlotsChecked, Tick

from tests.unit.core.host import Host, Instance, keys
from tests.unit.core.recovering import digest_of, recovered

SMALL_POOL = PoolGeometry(extents=1, extent_bytes=1 << 15, first_extent_offset=2 << 20)
"""Room for six blocks of 4 KiB."""


def key(number: int) -> bytes:
    return keys(number).tobytes()


def explain(host: Host, number: int, namespace: str = "") -> Explanation:
    [explanation] = host.machine.explain(key(number), namespace).explanations
    return explanation


@pytest.fixture
def host(make_host: Callable[..., Host]) -> Host:
    return make_host(None, SMALL_POOL)


@pytest.fixture
def one(host: Host) -> Instance:
    return host.instance()


def test_readable_and_being_written(host: Host, one: Instance) -> None:
    one.stored(1)
    one.store(2)
    assert (explain(host, 1).verdict, explain(host, 1).age_s) == (BlockVerdict.READABLE, None)
    assert explain(host, 2).verdict is BlockVerdict.BEING_WRITTEN


def test_evicted_and_when(host: Host, one: Instance) -> None:
    one.stored(*range(6))
    one.stored(10)
    host.now_s += 42
    assert (explain(host, 5).verdict, explain(host, 5).age_s) == (BlockVerdict.EVICTED, 42)
    assert explain(host, 0).verdict is BlockVerdict.READABLE
    one.stored(5)
    assert explain(host, 5).verdict is BlockVerdict.READABLE, "what is true now goes before what was"


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (PartOutcome.FAILED, Reason.COPY_FAILED),
        (PartOutcome.REVOKED, Reason.REVOKED),
        (PartOutcome.GATE_DEADLINE, Reason.GATE_DEADLINE),
    ],
)
def test_a_store_that_ended_says_why(host: Host, one: Instance, outcome: PartOutcome, reason: Reason) -> None:
    one.store(1, 2).part(0, outcome, [1] if outcome is PartOutcome.FAILED else [])
    assert (explain(host, 2).verdict, explain(host, 2).reason) == (BlockVerdict.STORE_ENDED, reason)


def test_a_store_that_was_late_or_whose_engine_died(host: Host, one: Instance) -> None:
    late = one.store(1)
    host.now_s += 200
    host.do(Tick())
    late.part(0, PartOutcome.REVOKED)
    assert explain(host, 1).reason is Reason.DEADLINE
    dying = one.store(2)
    host.do(EndSession(one.scheduler, "killed"))
    dying.part(0, PartOutcome.REVOKED)
    assert (explain(host, 2).verdict, explain(host, 2).reason) == (
        BlockVerdict.STORE_ENDED,
        Reason.EPOCH_ENDED,
    )


def test_refused_for_want_of_room(host: Host, one: Instance) -> None:
    one.store(*range(6))
    assert one.store(7).results == [3]
    assert explain(host, 7).verdict is BlockVerdict.REFUSED


def test_corrupt_before_and_after_its_last_pin(host: Host, one: Instance) -> None:
    one.stored(1)
    held = one.lease(1)
    one.load(one.lease(1), [0]).part(0, PartOutcome.FAILED, corrupt=True)
    host.now_s += 3
    assert (explain(host, 1).verdict, explain(host, 1).age_s) == (BlockVerdict.CORRUPT, 3)
    one.load(held, [0]).part(0, PartOutcome.FAILED, corrupt=True)
    assert (explain(host, 1).verdict, explain(host, 1).age_s) == (BlockVerdict.CORRUPT, 3)


def test_corrupt_as_sampling_found_it(host: Host, one: Instance) -> None:
    one.stored(1)
    host.do(Tick())
    host.now_s += 1
    host.do(Tick())
    check = host.machine.core.check
    assert check is not None
    host.do(SlotsChecked(check.worker.worker, check.check, 1, keys(0)[0, :1].astype("u4")))
    assert explain(host, 1).verdict is BlockVerdict.CORRUPT


def test_never_stored_as_far_as_is_remembered(host: Host, one: Instance) -> None:
    answer = host.machine.explain(key(1))
    assert [each.verdict for each in answer.explanations] == [BlockVerdict.NEVER_STORED]
    assert (answer.remembered_blocks, answer.remembered_s) == (0, None)


def test_stored_in_another_namespace(host: Host, one: Instance) -> None:
    other = host.instance("other", fields=b"elsewhere", sizes=((8192,),))
    other.stored(1)
    namespaces = {each.name: each.namespace or b"" for each in host.machine.status().instances}
    found = explain(host, 1, namespaces["engine"].hex())
    assert found.verdict is BlockVerdict.ELSEWHERE
    [place] = found.elsewhere
    assert (place.namespace, place.group) == (namespaces["other"], 0)
    assert place.about is not None
    assert (place.about.fields, place.about.groups[0].slot_bytes) == (b"elsewhere", 8192)
    assert explain(host, 1, namespaces["other"].hex()).elsewhere == ()


def test_stored_in_another_group(host: Host) -> None:
    two = host.instance(sizes=((4096,), (4096,)))
    two.submit(two.store_of(1, group=1)).finish()
    first, second = sorted(host.machine.explain(key(1)).explanations, key=lambda each: each.place.group)
    assert (first.verdict, second.verdict) == (BlockVerdict.ELSEWHERE, BlockVerdict.READABLE)
    [only] = host.machine.explain(key(1), group=1).explanations
    assert only.verdict is BlockVerdict.READABLE


def test_what_an_earlier_daemon_stored_is_known_by_its_digest(host: Host, table: Any) -> None:
    digest = digest_of(table, fields=b"old")
    host.do(recovered([(digest, 0, 1)], [(0, 1, [_first_slot()])], extents=((0, 4096),)))
    found = explain(host, 1)
    assert (found.verdict, found.place.namespace, found.place.about) == (BlockVerdict.READABLE, digest, None)
    host.instance("old", fields=b"old")
    assert explain(host, 1).place.about is not None, "now an engine has said what it is"


def _first_slot() -> int:
    return int(SMALL_POOL.slots_of(0, 4096)[0])


def test_namespaces_outlive_their_engines_as_long_as_their_blocks(host: Host, one: Instance) -> None:
    one.stored(1)
    host.do(EndSession(one.scheduler, "killed"))
    assert explain(host, 1).verdict is BlockVerdict.READABLE


@pytest.mark.parametrize(
    ("block_hash", "namespace", "reason", "field"),
    [
        (b"", "", Reason.HASH_LENGTH, "hash"),
        (bytes(33), "", Reason.HASH_LENGTH, "hash"),
        (bytes(31), "", Reason.HASH_LENGTH, "hash"),
        (bytes(32), "zz", Reason.NAMESPACE_INVALID, "namespace"),
    ],
)
def test_what_cannot_be_asked(
    host: Host, one: Instance, block_hash: bytes, namespace: str, reason: Reason, field: str
) -> None:
    with pytest.raises(Refusal) as refused:
        host.machine.explain(block_hash, namespace)
    assert (refused.value.reason, refused.value.field) == (reason, field)


def test_a_hash_that_was_cut_is_told_how_long_those_are(host: Host, one: Instance) -> None:
    digest = host.machine.status().instances[0].namespace or b""
    with pytest.raises(Refusal) as refused:
        host.machine.explain(b"\xde\xad")
    assert refused.value.message == (
        f"hash 'dead' has 2 bytes, and those of namespace {digest.hex()} have 32: give the whole hash"
    )


def test_each_place_is_looked_at_once_however_many_there_are(make_host: Callable[..., Host]) -> None:
    host = make_host(None, PoolGeometry(extents=1, extent_bytes=1 << 18, first_extent_offset=2 << 20))
    engines = [host.instance(f"engine{n}", fields=b"%d" % n) for n in range(20)]
    for engine in engines[5:]:
        engine.stored(1)
    blocks = host.machine.core.blocks
    table, history = Counting(blocks.table), Counting(blocks.history)
    blocks.table, blocks.history = table, history  # type: ignore[assignment]
    found = host.machine.explain(key(1)).explanations
    assert (table.calls["lookup"], history.calls["fates"]) == (20, 1)
    assert [len(each.elsewhere) for each in found] == [ELSEWHERE_MAX] * 20
    assert not any(each.place in each.elsewhere for each in found)


class Counting:
    """Passes everything on, and counts how often each name is asked for."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._target, name)

    def __len__(self) -> int:
        return len(self._target)


def test_places_where_the_block_is_known_come_first_then_those_in_use(host: Host) -> None:
    left, known, used = (host.instance(name, fields=name.encode()) for name in ("left", "known", "used"))
    left.stored(2)
    known.stored(1)
    digests = {each.name: each.namespace for each in host.machine.status().instances}
    for gone in (known, left):
        host.do(EndSession(gone.scheduler, "killed"))
        assert isinstance(gone.worker, int)
        host.do(SessionReleased(WorkerId(gone.worker), gone.scheduler))
    found = [each.place.namespace for each in host.machine.explain(key(1)).explanations]
    assert found == [digests[name] for name in ("known", "used", "left")]
    assert used.scheduler in host.machine.core.sessions


def test_namespaces_are_listed_by_how_they_begin(host: Host, one: Instance) -> None:
    host.instance("other", fields=b"other")
    first, second = (each.place.namespace for each in host.machine.namespaces())
    assert [each.place.namespace for each in host.machine.namespaces(second.hex()[:9])] == [second]
    assert first != second


def test_nothing_changes_by_asking(host: Host, one: Instance) -> None:
    one.stored(*range(6))
    before = one.host.machine.core.blocks.table.dump()
    order = one.host.machine.core.blocks.table.victims(0, 6).tolist()
    host.machine.explain(key(5))
    after = one.host.machine.core.blocks.table.dump()
    assert all((before[name] == after[name]).all() for name in before)
    assert one.host.machine.core.blocks.table.victims(0, 6).tolist() == order
