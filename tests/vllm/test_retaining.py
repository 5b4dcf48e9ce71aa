"""How long and where an engine has its blocks kept: what it says of them, and what the daemon makes of it."""

from __future__ import annotations

import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from kvtier import Client, GroupQuery, Retention
from kvtier_engine.hints import Hold
from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.scheduler.ahead import PREFETCHES_MAX
from kvtier_vllm.scheduler.control import Control
from kvtier_vllm.scheduler.known import KNOWN_S, KNOWN_TTL_PART, KnownBlocks
from kvtier_vllm.scheduler.leaving import PATIENCE_S, Leaving
from kvtier_vllm.scheduler.retaining import PLAIN, Keeping, Kept
from kvtier_vllm.scheduler.storing import Made, StoreState
from kvtier_vllm.scheduler.tracking import TrackedRequest

from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.vllm.conftest import QUICK
from tests.vllm.mini_engine import TOKENS, MiniEngine, output_of
from tests.vllm.mini_rig import Chaos, all_came_back, client, wait_stored
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["make"]

Make = Callable[..., MiniEngine]
LENGTH, BLOCKS = 10 * TOKENS + 1, 10
MANY_S = 600
log = logging.getLogger("test.retaining")


@pytest.fixture
def host() -> Iterator[DaemonHost]:
    """A daemon of the test's own: what is held in it would be in the way of others."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    host = DaemonHost(run, pool / "pool", pool__size="6MiB", **QUICK)
    host.start()
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture
def patient(make: Make) -> Make:
    """Makes engines that wait for the daemon's answers, however busy the machine is."""

    def patiently(*arguments: Any, **extra: object) -> MiniEngine:
        return make(*arguments, **{"lookup_budget_ms": 1_000} | extra)

    return patiently


class Spy:
    """What an engine's client is asked to do."""

    def __init__(self, engine: MiniEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stores: list[tuple[list[bytes], Retention | None]] = []
        self.touches: list[tuple[list[bytes], float]] = []
        self.cooled: list[bytes] = []
        self.lookups: list[bool] = []
        """host_only, of each."""
        self.prefetches = 0
        self._of = client(engine)
        for name in ("store", "touch", "cool", "start_lookup", "start_prefetch"):
            monkeypatch.setattr(self._of, name, self._noting(name, getattr(self._of, name)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(hashes: Sequence[bytes], *rest: Any, **options: Any) -> Any:
            match name:
                case "store":
                    self.stores.append((list(hashes), options.get("retention")))
                case "touch":
                    self.touches.append((list(hashes), options.get("hold_s", 0)))
                case "cool":
                    self.cooled += hashes
                case "start_lookup":
                    self.lookups.append(options.get("host_only", False))
                case _:
                    self.prefetches += 1
            return call(hashes, *rest, **options)

        return noted


def compute(
    engine: MiniEngine, name: str, tokens: list[int], wish: dict[str, Any] | None = None, **request: Any
) -> int:
    """Runs one request until its stores are over and all is said; returns the tokens that nobody computed."""
    engine.add(name, tokens, kv_transfer_params={"kvtier": wish}, **request)
    engine.run()
    wait_stored(engine)
    engine.step()
    assert engine.finished[name] == output_of(tokens, 8)
    return engine.cached[name]


def has(engine: MiniEngine, hashes: Sequence[bytes]) -> list[bool]:
    """Which blocks the daemon knows, without using them."""
    known = client(engine).known_run
    until(lambda: known(hashes[:1], counted=False) is not None, "there is an index page")
    return [known([one], counted=False) == 1 for one in hashes]


def churn(engine: MiniEngine, over: Callable[[], bool]) -> None:
    """Computes other prompts until that is so. Small ones: each makes little room."""
    numbers = itertools.count()

    def computed() -> bool:
        number = next(numbers)
        compute(engine, f"churn {number}", prompt(5 * TOKENS, seed=1_000 + number))
        return over()

    until(computed, "what goes has gone")


def hashes_of(spy: Spy) -> list[bytes]:
    """Of all blocks that were stored."""
    return [one for hashes, _ in spy.stores for one in hashes]


# --- held ---


def test_what_a_request_has_used_is_held_after_its_end(
    patient: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = patient(pin_s=MANY_S), patient()
    spy = Spy(engine, monkeypatch)
    compute(engine, "story", prompt(LENGTH))
    until(lambda: host.status().held_blocks == BLOCKS, "all of it is held")
    churn(other, lambda: host.status().counters.evicted_blocks > 2 * host.status().blocks.ready)
    assert all(has(engine, hashes_of(spy)))
    engine.forget()
    assert compute(engine, "again", prompt(LENGTH)) == BLOCKS * TOKENS
    assert host.status().held_blocks == BLOCKS
    all_came_back(engine)


def test_a_request_asks_to_be_held_within_bounds(
    patient: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = patient(max_pin_s=100)
    spy = Spy(engine, monkeypatch)
    for seed, wish, hold_s in (
        (1, None, 0),
        (2, {"pin_s": 50}, 50),
        (3, {"pin_s": 500}, 100),
        (4, {"priority": "high"}, 100),
    ):
        spy.touches.clear()
        compute(engine, f"request {seed}", prompt(LENGTH, seed), wish)
        assert [(len(hashes), held_s) for hashes, held_s in spy.touches] == [(BLOCKS, hold_s)]
    until(lambda: host.status().held_blocks == 3 * BLOCKS, "those of three are held")
    all_came_back(engine)


def test_what_was_only_loaded_is_held_too(
    patient: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = patient(salt="same"), patient(salt="same", store=False)
    compute(one, "story", prompt(LENGTH))
    spy = Spy(two, monkeypatch)
    assert compute(two, "again", prompt(LENGTH), {"pin_s": MANY_S}) == BLOCKS * TOKENS
    assert [len(hashes) for hashes, _ in spy.touches] == [BLOCKS]
    until(lambda: host.status().held_blocks == BLOCKS, "what it has loaded is held")
    compute(two, "others", prompt(LENGTH, seed=3))
    assert len(spy.touches) == 1, "an engine that stores nothing says nothing else"


# --- hinted ---


def hint(action_type: str, **payload: Any) -> dict[str, Any]:
    action = {"action_id": "turn 7", "action_type": action_type, "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "one", "actions": [action]}


def test_an_orchestrator_has_the_head_held_and_the_tail_let_go_and_is_told(
    patient: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = pytest.importorskip("vllm.v1.kv_hints", reason="requests have no hints in this vLLM")
    engine = patient(max_pin_s=100)
    spy, story = Spy(engine, monkeypatch), prompt(LENGTH)
    directives = [{"end": 4 * TOKENS, "priority": 9}, {"start": 6 * TOKENS, "priority": 0}]
    envelope = msgspec.convert(hint("kv.retain", directives=directives), protocol.KvHintsEnvelope)
    compute(engine, "hinted", story, kv_hints=envelope)
    assert spy.cooled == hashes_of(spy)[6:]
    assert [(len(hashes), held_s) for hashes, held_s in spy.touches] == [(4, 100), (6, 0)]
    until(lambda: host.status().held_blocks == 4, "the head is held, and nothing else")
    told = {"action_id": "turn 7", "action_type": "kv.retain", "answer": "clipped"}
    assert engine.told["hinted"] == {
        "kvtier_kv_hints": [told | {"reason": "held for 100 s, which is max_pin_s"}]
    }
    compute(engine, "plain", story)
    assert "plain" not in engine.told
    all_came_back(engine)


def test_hints_come_with_the_parameters_of_a_request_too(patient: Make, host: DaemonHost) -> None:
    engine = patient()
    given: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("kv.pin", {"duration": 60, "end": TOKENS}, "accepted"),
        ("kv.fetch", {"source_control_endpoint": "tcp://other:1", "block_hashes": [1]}, "refused"),
        ("kv.prefetch", {}, "accepted"),
    )
    for number, (action_type, payload, answer) in enumerate(given):
        name = f"request {number}"
        wish = {"kv_hints": hint(action_type, **payload)}
        compute(engine, name, prompt(LENGTH, seed=number), wish)
        assert [each["answer"] for each in engine.told[name]["kvtier_kv_hints"]] == [answer]
    until(lambda: host.status().held_blocks == 1, "one block is held")
    totals = engine.connector._scheduler.totals()
    assert (totals["hints_accepted"], totals["hints_clipped"], totals["hints_refused"]) == (2, 0, 1)
    all_came_back(engine)


def test_a_request_deep_in_the_queue_is_promoted_if_somebody_says_so(
    patient: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = patient()
    spy = Spy(engine, monkeypatch)
    for number in range(3 * PREFETCHES_MAX):
        wish = {"kv_hints": hint("kv.prefetch")} if number % 8 == 7 else None
        engine.add(str(number), prompt(LENGTH, seed=number), kv_transfer_params={"kvtier": wish})
    assert spy.prefetches == 3, "at once, whatever their place"
    engine.run()
    all_came_back(engine)


# --- let go first ---


def test_what_a_request_of_low_priority_has_made_goes_first_and_what_it_shares_does_not(
    patient: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = patient(), patient()
    spy, shared = Spy(engine, monkeypatch), prompt(6 * TOKENS)
    compute(engine, "shared", [*shared, 1])
    head = hashes_of(spy)
    spy.stores.clear()
    spy.touches.clear()
    compute(engine, "low", shared + prompt(8 * TOKENS, seed=7), {"priority": "low"})
    made = hashes_of(spy)
    assert (len(head), len(made)) == (6, 8)
    assert spy.cooled == made
    assert [hashes for hashes, _ in spy.touches] == [head], "what it has used is in use"
    churn(other, lambda: not any(has(engine, made)))
    assert all(has(engine, head))
    all_came_back(engine)
    all_came_back(other)


def test_what_is_there_already_is_nobody_s_to_cool(patient: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = patient(priority="low")
    spy = Spy(engine, monkeypatch)
    compute(engine, "first", prompt(LENGTH))
    assert len(spy.cooled) == BLOCKS
    assert spy.touches == []
    compute(engine, "second", prompt(LENGTH))
    assert len(spy.cooled) == BLOCKS
    assert [len(hashes) for hashes, _ in spy.touches] == [BLOCKS], "used again"
    all_came_back(engine)


# --- dropped after a time ---


def test_blocks_with_a_time_are_gone_after_it(
    patient: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = patient(ttl_s=2)
    spy = Spy(engine, monkeypatch)
    compute(engine, "story", prompt(LENGTH), {"ttl_s": 100})
    assert {retention for _, retention in spy.stores} == {Retention(ttl_s=2, host_only=True)}
    until(lambda: host.status().counters.expired_blocks == BLOCKS, "their time is over")
    engine.forget()
    assert compute(engine, "again", prompt(LENGTH)) == 0
    all_came_back(engine)


def test_a_request_without_a_time_keeps_what_one_with_a_time_has_made(
    patient: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the blocks are there, and the engine knows it."""
    engine, tokens = patient(), prompt(LENGTH)
    spy = Spy(engine, monkeypatch)
    # Long enough for a busy machine to come to the one without a time before it is over.
    compute(engine, "short", tokens, {"ttl_s": 10})
    compute(engine, "gone", prompt(LENGTH, seed=3), {"ttl_s": 10})
    made = hashes_of(spy)
    compute(engine, "plain", tokens)
    assert spy.stores[-1] == (made[:BLOCKS], None)
    until(lambda: host.status().counters.expired_blocks == BLOCKS, "the time is over")
    assert has(engine, made) == [True] * BLOCKS + [False] * BLOCKS
    stores = len(spy.stores)
    compute(engine, "short again", tokens, {"ttl_s": 10})
    assert len(spy.stores) == stores, "they are kept for longer than that"
    all_came_back(engine)


def test_what_was_loaded_may_still_have_a_time(patient: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = patient(), prompt(LENGTH)
    compute(engine, "short", tokens, {"ttl_s": 60})
    engine.forget()
    spy = Spy(engine, monkeypatch)
    assert compute(engine, "loads", tokens) == BLOCKS * TOKENS
    assert [(len(hashes), retention) for hashes, retention in spy.stores] == [(BLOCKS, None)]
    all_came_back(engine)


# --- in some tiers only ---


def test_an_engine_of_the_host_alone_asks_no_disk(patient: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = patient(tiers=["host"], changes={"max_num_seqs": 1})
    spy = Spy(engine, monkeypatch)
    compute(engine, "story", prompt(LENGTH))
    assert {retention for _, retention in spy.stores} == {Retention(host_only=True)}
    engine.forget()
    engine.add("long", prompt(20, seed=9), max_tokens=40)
    engine.step()
    assert compute(engine, "again", prompt(LENGTH), {"tiers": ["host", "disk"]}) == BLOCKS * TOKENS
    assert spy.lookups
    assert all(spy.lookups)
    assert spy.prefetches == 0
    all_came_back(engine)


def test_a_request_leaves_disks_out(patient: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = patient()
    spy = Spy(engine, monkeypatch)
    for name, seed, wish, retention in (
        ("host", 1, {"tiers": ["host"]}, Retention(host_only=True)),
        ("both", 2, None, None),
    ):
        spy.stores.clear()
        compute(engine, name, prompt(LENGTH, seed), wish)
        assert {found for _, found in spy.stores} == {retention}
    engine.forget()
    for seed, wish, host_only in ((1, {"tiers": ["host"]}, True), (2, None, False)):
        spy.lookups.clear()
        assert compute(engine, f"again {seed}", prompt(LENGTH, seed), wish) == BLOCKS * TOKENS
        assert set(spy.lookups) == {host_only}
    all_came_back(engine)


# --- in disorder, and with a daemon that knows nothing of it ---


@pytest.mark.faults
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"priority": "low", "ttl_s": 2}, id="low and short", marks=pytest.mark.long),
        pytest.param({"pin_s": 1, "tiers": ["host"]}, id="held on the host"),
    ],
)
def test_disorder_costs_no_byte_no_block_and_no_request(
    make: Make, host: DaemonHost, settings: dict[str, Any]
) -> None:
    engine = make(load_start_deadline_s=0.2, **settings)
    chaos = Chaos(engine, host, seed=5)
    chaos.go_on(60)
    chaos.end()


# --- what is remembered ---


def test_a_store_is_spared_only_where_it_would_change_nothing() -> None:
    now_s = 0.0
    known = KnownBlocks(lambda: now_s)
    [one, two, three, four] = [bytes([number]) * 32 for number in range(4)]
    host, minute, hour = Kept(on_disks=False), Kept(ttl_s=60), Kept(ttl_s=3_600)
    for block_hash, kept in ((one, PLAIN), (two, host), (three, hour)):
        known.add([block_hash], kept)
    for block_hash, covered in (
        (one, [True, True, True, True]),
        (two, [False, True, True, True]),
        (three, [False, False, True, True]),
        (four, [False, False, False, False]),
    ):
        assert [known.covers(block_hash, kept) for kept in (PLAIN, host, hour, minute)] == covered
    known.seen([one, three, four])
    assert [known.covers(each) for each in (one, three, four)] == [True, False, True], "it tells of no time"
    known.add([four], minute)
    assert known.covers(four, minute)
    now_s = 60 * KNOWN_TTL_PART
    assert not known.covers(four, minute), "its time is to begin anew"
    assert known.covers(three, hour)
    now_s = KNOWN_S
    known.seen([one, two, three, four])
    assert not any(known.covers(each, minute) for each in (one, two, three, four)), "to be submitted again"
    known.add([three])
    assert known.covers(three)
    known.clear()
    assert not known.covers(three)


def test_as_much_is_remembered_as_there_is_room_for() -> None:
    known = KnownBlocks(lambda: 0.0, most=2)
    known.add([b"1", b"2"], Kept(ttl_s=60))
    known.add([b"3"])
    known.seen([b"4"])
    assert len(known._until_s) == 2
    assert known._lesser == {}


# --- last words ---


class Telling:
    """A client that only listens."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[bytes], Any]] = []
        self.queries: list[GroupQuery] = []

    def touch(
        self,
        hashes: Sequence[bytes],
        queries: Sequence[GroupQuery],
        *,
        hold_s: float = 0,
        lazily: bool = False,
    ) -> None:
        assert lazily == (hold_s == 0), "a hold is wished for at once"
        self.queries = list(queries)
        self.heard.append(("touch", list(hashes), hold_s))

    def cool(self, hashes: Sequence[bytes], *, group: int) -> None:
        self.heard.append(("cool", list(hashes), group))


HASHES = [bytes([number]) * 32 for number in range(8)]


def over(groups: Groups, keeping: Keeping, blocks: int, *, store: bool = True) -> TrackedRequest:
    """A request that is over, and has submitted so many blocks of each group."""
    request = SimpleNamespace(block_hashes=HASHES)
    control = Control(store, True, None, None, keeping)
    stores = StoreState(request, [blocks] * len(groups.shapes))
    if keeping.cool_from_tokens is not None:
        stores.made = Made(groups.shapes, keeping.cool_from_tokens)
    return TrackedRequest(request, control, stores, keys=lambda hashes: hashes)


@pytest.fixture
def telling() -> Telling:
    return Telling()


def test_a_request_with_wishes_waits_for_its_stores(telling: Telling) -> None:
    groups, now_s = Groups.one(16), 0.0
    leaving = Leaving(groups, groups.shapes[0], clock=lambda: now_s)
    listener = cast(Client, telling)
    plain, held = over(groups, Keeping(), 4), over(groups, Keeping(holds=(Hold(7),)), 3)
    cooled = over(groups, Keeping(holds=(Hold(2),), cool_from_tokens=0), 6)
    for tracked in (plain, held, cooled):
        tracked.stores.under_way = 1
        leaving.over(listener, tracked)
    assert telling.heard == [("touch", HASHES[:4], 0)]
    leaving.tell(listener)
    assert (len(telling.heard), len(leaving)) == (1, 2)
    assert cooled.stores.made is not None
    for index in (4, 3, 5):
        cooled.stores.made.add(0, index, HASHES[index])
    cooled.stores.under_way = 0
    leaving.tell(listener)
    assert telling.heard[1:] == [("touch", HASHES[:3], 2), ("cool", HASHES[3:6], 0)]
    assert len(leaving) == 1
    now_s = PATIENCE_S + 1
    leaving.tell(listener)
    assert (len(telling.heard), len(leaving)) == (3, 0), "a store that never ends is not waited for for ever"


def test_without_a_daemon_nothing_is_kept_to_be_told(telling: Telling) -> None:
    groups = Groups.one(16)
    leaving = Leaving(groups, groups.shapes[0])
    for forget in (leaving.clear, lambda: leaving.tell(None)):
        tracked = over(groups, Keeping(holds=(Hold(7),)), 3)
        tracked.stores.under_way = 1
        leaving.over(cast(Client, telling), tracked)
        assert len(leaving) == 1
        forget()
        assert len(leaving) == 0
    assert telling.heard == []


def test_the_head_of_a_request_is_held_and_its_tail_goes_first(telling: Telling) -> None:
    groups = Groups((GroupShape(0, 16), GroupShape(1, 32, hash_stride=2)), 32)
    leaving = Leaving(groups, groups.shapes[0])
    keeping = Keeping(holds=(Hold(9, 20), Hold(5, 33), Hold(3, 10**9)), cool_from_tokens=65)
    tracked = over(groups, keeping, 8)
    made = tracked.stores.made
    assert made is not None
    for index in range(8):
        made.add(0, index, HASHES[index])
    for index in range(4):
        made.add(1, index, HASHES[2 * index + 1])
    leaving.over(cast(Client, telling), tracked)
    assert telling.heard == [
        ("touch", HASHES[:2], 9),
        ("touch", HASHES[:3], 5),
        ("touch", HASHES[:5], 3),
        ("cool", HASHES[5:], 0),  # a block with a token that stays, stays
        ("cool", [HASHES[7]], 1),
    ]
    part = over(groups, Keeping(holds=(Hold(9, 20),)), 8)
    telling.heard.clear()
    leaving.over(cast(Client, telling), part)
    assert telling.heard == [("touch", HASHES[:2], 9), ("touch", HASHES, 0)]


def test_of_several_groups_each_has_made_its_own(telling: Telling) -> None:
    groups = Groups((GroupShape(0, 16), GroupShape(1, 32, hash_stride=2)), 16)
    leaving = Leaving(groups, groups.shapes[0])
    tracked = over(groups, Keeping(cool_from_tokens=0), 6)
    assert tracked.stores.made is not None
    tracked.stores.made.add(0, 2, HASHES[2])
    tracked.stores.made.add(1, 1, HASHES[3])
    leaving.over(cast(Client, telling), tracked)
    assert telling.queries == [GroupQuery(0), GroupQuery(1, hash_stride=2)]
    assert telling.heard == [
        ("touch", HASHES[:2], 0),
        ("cool", [HASHES[2]], 0),
        ("cool", [HASHES[3]], 1),
    ]


def test_a_request_that_stores_nothing_holds_what_it_began_with(telling: Telling) -> None:
    groups = Groups.one(16)
    leaving = Leaving(groups, groups.shapes[0])
    for keeping in (Keeping(holds=(Hold(7),)), Keeping(), Keeping(cool_from_tokens=0)):
        tracked = over(groups, keeping, 0, store=False)
        tracked.expected_tokens = 3 * 16
        leaving.over(cast(Client, telling), tracked)
    assert telling.heard == [("touch", HASHES[:3], 7)]


def test_an_engine_goes_on_until_all_is_said(
    patient: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's word that a store has ended may come after the last step that a request needs."""
    engine = patient(pin_s=MANY_S)
    side = engine.connector._scheduler
    poll, polls = side._storer.poll, itertools.count()
    monkeypatch.setattr(side._storer, "poll", lambda: poll() if next(polls) > 60 else [])
    engine.add("story", prompt(LENGTH))
    engine.run()
    assert next(polls) > 60
    assert not engine.connector.has_pending_push_work()
    until(lambda: host.status().held_blocks == BLOCKS, "all of it is held")
    all_came_back(engine)
