"""KV events say what the daemon holds, with all that a router needs, and only where they are wanted."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import vllm
from kvtier_vllm.model.namespace import TAGGED_EXTRA_KEYS_VLLM, version_of

from tests.support.daemon import until
from tests.vllm.mini_adapters import Shared, lora_request, write_adapter
from tests.vllm.mini_engine import TOKENS, MiniEngine, _kv_cache_config
from tests.vllm.mini_rig import all_came_back, client, compute, hashes_of, step_until, wait_ready
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

STORY, BLOCKS = prompt(10 * TOKENS + 1, seed=3), 10
log = logging.getLogger("test.events")


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events have them, and not the 64 bits of them that vLLM publishes by default."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@pytest.fixture
def announcing(make: Callable[..., MiniEngine]) -> Callable[..., MiniEngine]:
    """Makes engines with KV events."""

    def engine(changes: dict[str, Any] | None = None, **settings: Any) -> MiniEngine:
        from vllm.config import KVEventsConfig

        wanted = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return make(changes={"kv_events_config": wanted, **(changes or {})}, **settings)

    return engine


def ours(events: Iterable[Any]) -> list[Any]:
    """Those of the connector."""
    return [event for event in events if getattr(event, "ownership", None) == "kvtier"]


def announced(engine: MiniEngine) -> set[bytes]:
    """What somebody believes who has heard everything."""
    held: set[bytes] = set()
    for event in ours(engine.kv_events):
        if type(event).__name__ == "BlockStored":
            held.update(event.block_hashes)
        else:
            held.difference_update(event.block_hashes)
    return held


def test_what_was_stored_is_announced_with_all_that_its_hash_is_made_of(
    announcing: Callable[..., MiniEngine],
) -> None:
    from vllm.v1.core import kv_cache_utils

    engine = announcing()
    compute(engine, "story", STORY, max_tokens=2, cache_salt="salt")
    [first, *more] = ours(engine.kv_events)
    assert (first.medium, first.locality, first.group_idx) == ("CPU", "LOCAL", 0)
    assert (first.block_size, first.kv_cache_spec_kind) == (TOKENS, "full_attention")
    assert (first.parent_block_hash, first.lora_id, first.lora_name) == (None, None, None)
    told = [block_hash for event in (first, *more) for block_hash in event.block_hashes]
    assert told == hashes_of(engine, STORY, cache_salt="salt")
    assert [token for event in (first, *more) for token in event.token_ids] == STORY[: BLOCKS * TOKENS]
    assert first.extra_keys[0] == ("salt",)
    assert not any(first.extra_keys[1:])
    for before, event in zip((first, *more), more, strict=False):
        assert event.parent_block_hash == before.block_hashes[-1]
    # Chained anew from what the events say; the salt goes into the first block alone.
    chained, parent = [], kv_cache_utils.NONE_HASH
    salted = ("cache_salt", "salt") if version_of(vllm.__version__) >= TAGGED_EXTRA_KEYS_VLLM else "salt"
    for index in range(BLOCKS):
        keys = (salted,) if index == 0 else None
        tokens = STORY[index * TOKENS : (index + 1) * TOKENS]
        parent = kv_cache_utils.hash_block_tokens(_sha256(), parent, tokens, keys)
        chained.append(parent)
    assert chained == told
    all_came_back(engine)


def _sha256() -> Any:
    from vllm.utils.hashing import sha256

    return sha256


def test_events_travel_as_maps_of_named_fields(announcing: Callable[..., MiniEngine]) -> None:
    from vllm.distributed.kv_events import KVEventBatch

    engine = announcing()
    compute(engine, "story", STORY)
    batch = KVEventBatch(ts=0.0, events=ours(engine.kv_events))
    payload = msgspec.msgpack.encode(batch)
    _, events, *_ = msgspec.msgpack.decode(payload)
    assert events[0]["type"] == "BlockStored"
    assert events[0].keys() >= {"block_hashes", "token_ids", "block_size", "medium", "ownership", "group_idx"}
    assert msgspec.msgpack.decode(payload, type=KVEventBatch).events == ours(engine.kv_events)


def test_nothing_is_collected_where_nobody_listens(make: Callable[..., MiniEngine]) -> None:
    engine = make()
    compute(engine, "story", STORY)
    assert not engine.kv_events
    assert engine.connector._scheduler._events is None
    assert list(engine.connector.take_events()) == []


def test_what_another_engine_stored_is_announced_when_it_was_loaded(
    announcing: Callable[..., MiniEngine],
) -> None:
    first, second = announcing(salt="shared"), announcing(salt="shared")
    compute(first, "story", STORY)
    assert not ours(second.kv_events)
    assert compute(second, "again", STORY) == BLOCKS * TOKENS
    assert announced(second) == set(hashes_of(second, STORY)) == announced(first)
    all_came_back(first)
    all_came_back(second)


def test_what_is_known_is_not_announced_again(announcing: Callable[..., MiniEngine]) -> None:
    engine = announcing()
    compute(engine, "story", STORY)
    count = len(ours(engine.kv_events))
    compute(engine, "again", STORY)
    engine.forget()
    compute(engine, "loaded", STORY)
    assert len(ours(engine.kv_events)) == count
    assert announced(engine) == set(hashes_of(engine, STORY))


def test_what_the_daemon_evicted_is_announced_as_removed(
    announcing: Callable[..., MiniEngine],
) -> None:
    engine = announcing()
    compute(engine, "story", STORY)
    assert announced(engine) == set(hashes_of(engine, STORY))
    seeds = itertools.count(100)

    def evicted() -> bool:
        compute(engine, f"filler {(seed := next(seeds))}", prompt(20 * TOKENS, seed))
        return announced(engine).isdisjoint(hashes_of(engine, STORY))

    until(evicted, "its removal is announced")
    assert announced(engine), "the latest are still there"
    spared = client(engine).status.counters.lookups_local
    for _ in range(3):
        engine.step()
    assert client(engine).status.counters.lookups_local == spared, "looking through the page is no lookup"
    all_came_back(engine)


def test_after_a_restart_of_the_daemon_all_is_removed_and_told_anew(
    announcing: Callable[..., MiniEngine], host: Any
) -> None:
    engine = announcing()
    compute(engine, "story", STORY)
    nonce = client(engine).status.boot_nonce
    host.restart()
    step_until(
        engine,
        lambda: client(engine).ready and client(engine).status.boot_nonce != nonce,
        "the engine is attached to the new daemon",
    )
    engine.step()
    engine.step()
    assert announced(engine) == set()
    compute(engine, "again", STORY)
    assert announced(engine) == set(hashes_of(engine, STORY)), "the pool is warm, and that is found out"
    all_came_back(engine)


def test_a_reset_cache_takes_everything_back(announcing: Callable[..., MiniEngine]) -> None:
    engine = announcing()
    compute(engine, "story", STORY)
    assert announced(engine)
    engine.connector.reset_cache()
    engine.step()
    assert announced(engine) == set()
    wait_ready(engine)
    compute(engine, "again", prompt(40, seed=9))
    assert announced(engine) == set(hashes_of(engine, prompt(40, seed=9)))
    all_came_back(engine)


def test_a_connector_that_is_switched_off_takes_everything_back(
    announcing: Callable[..., MiniEngine],
) -> None:
    engine = announcing()
    compute(engine, "story", STORY)
    engine.connector._disable(RuntimeError("for the test"))
    engine.step()
    assert announced(engine) == set()


def test_blocks_of_an_adapter_are_announced_and_removed_by_vllms_hashes(
    announcing: Callable[..., MiniEngine], tmp_path: Path
) -> None:
    engine = announcing(changes={"enable_lora": True, "max_lora_rank": 16}, adapters="files")
    folder = write_adapter(tmp_path / "one", 1)
    adapter, shared = lora_request(folder), Shared(engine)
    shared.identified(folder)
    plain, hashes = hashes_of(engine, STORY), hashes_of(engine, STORY, lora_request=adapter)
    compute(engine, "plain", STORY, max_tokens=2)
    assert announced(engine) == set(plain)
    told = len(ours(engine.kv_events))
    compute(engine, "adapted", STORY, max_tokens=2, lora_request=adapter)
    stored = ours(engine.kv_events)[told:]
    assert [block_hash for event in stored for block_hash in event.block_hashes] == hashes
    assert {(event.lora_name, event.lora_id) for event in stored} == {("one", adapter.adapter_id)}
    assert stored[0].parent_block_hash is None
    engine.forget()
    compute(engine, "loaded", STORY, max_tokens=2, lora_request=adapter)
    for _ in range(3):
        engine.step()
    assert announced(engine) == {*plain, *hashes}, "kvtierd has them, if by other keys"
    seeds = itertools.count(300)

    def evicted() -> bool:
        compute(engine, f"filler {(seed := next(seeds))}", prompt(20 * TOKENS, seed))
        return announced(engine).isdisjoint(hashes)

    until(evicted, "their removal is announced")
    all_came_back(engine)


def test_blocks_of_an_adapter_that_has_changed_are_not_announced(
    announcing: Callable[..., MiniEngine], tmp_path: Path
) -> None:
    engine = announcing(changes={"enable_lora": True, "max_lora_rank": 16}, adapters="files")
    folder = write_adapter(tmp_path / "one", 1)
    Shared(engine).identified(folder)
    write_adapter(folder, 2)
    compute(engine, "changed", STORY, lora_request=lora_request(folder))
    assert not ours(engine.kv_events)


def one_group(**bounds: int) -> Any:
    """Events without an engine."""
    from kvtier_vllm.groups import Groups
    from kvtier_vllm.scheduler.events import BlockEvents

    spec = _kv_cache_config(2).kv_cache_groups[0].kv_cache_spec
    return BlockEvents(Groups.one(TOKENS), [spec], log, **bounds)


def request_of(blocks: int, seed: int = 0) -> Any:
    """What is read of vLLM's."""
    return SimpleNamespace(
        block_hashes=[bytes([seed, index]) * 16 for index in range(blocks)],
        all_token_ids=list(range(blocks * TOKENS)),
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
    )


def hold(events: Any, request: Any, indexes: Iterable[int]) -> list[Any]:
    found = list(indexes)
    events.held(request, 0, found, [request.block_hashes[index] for index in found])
    return list(events.take())


def test_blocks_that_do_not_follow_each_other_are_events_of_their_own() -> None:
    request = request_of(9)
    events = hold(one_group(), request, [0, 1, 4, 5, 6, 8])
    assert [len(event.block_hashes) for event in events] == [2, 3, 1]
    assert [event.parent_block_hash for event in events] == [
        None,
        request.block_hashes[3],
        request.block_hashes[7],
    ]
    assert events[1].token_ids == list(range(4 * TOKENS, 7 * TOKENS))


def test_hashes_are_shortened_where_vllm_shortens_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    events, request = one_group(announced_max=2), request_of(3)
    stored, removed = hold(events, request, [1, 2]) + hold(events, request, [0])[1:]
    short = [int.from_bytes(block_hash[-8:], "big") for block_hash in request.block_hashes]
    assert [*stored.block_hashes, stored.parent_block_hash] == [short[1], short[2], short[0]]
    assert removed.block_hashes == [short[1]]


def test_a_request_that_has_other_hashes_by_now_describes_nothing() -> None:
    request, events = request_of(4), one_group()
    old = request.block_hashes[3]
    request.block_hashes[3] = b"other" * 6 + b"xx"
    events.held(request, 0, [2, 3], [request.block_hashes[2], old])
    [event] = events.take()
    assert event.block_hashes == [request.block_hashes[2]]
    events.held(request, 0, [4], [b"gone" * 8])
    assert not events.take()


@pytest.mark.parametrize("stride", [1, 2])
def test_events_have_vllms_hashes_and_the_index_page_is_asked_by_keys(stride: int) -> None:
    from kvtier_vllm.groups import Groups, GroupShape
    from kvtier_vllm.model.adapters import DerivedKeys
    from kvtier_vllm.scheduler.events import BlockEvents

    shape = GroupShape(0, stride * TOKENS, hash_stride=stride)
    spec = _kv_cache_config(2).kv_cache_groups[0].kv_cache_spec
    events, request = BlockEvents(Groups((shape,), TOKENS), [spec], log), request_of(4 * stride)
    events.keys_of = lambda _: lambda hashes: DerivedKeys(hashes, b"weights", {})
    keys = DerivedKeys(request.block_hashes, b"weights", {})[stride - 1 :: stride]
    hashes = request.block_hashes[stride - 1 :: stride]
    events.held(request, 0, [1, 2, 3], keys[1:])
    [stored] = events.take()
    assert (stored.block_hashes, stored.parent_block_hash) == (hashes[1:], hashes[0])
    assert stored.token_ids == list(range(stride * TOKENS, 4 * stride * TOKENS))
    events.held(request, 0, [0, 1], hashes[:2])
    assert not events.take(), "these are keys of nothing that it has"

    def known_run(asked: list[bytes], first: int, *, group: int, counted: bool) -> int:
        """All but one block are there."""
        assert (group, counted) == (0, False)
        left = asked[first:]
        return left.index(keys[2]) if keys[2] in left else len(left)

    client: Any = SimpleNamespace(known_run=known_run)
    events.check(client)
    [removed] = events.take()
    assert removed.block_hashes == [hashes[2]]
    events.keys_of = lambda _: None
    events.held(request, 0, [2], [keys[2]])
    assert not events.take()
    events.clear()
    [removed] = events.take()
    assert removed.block_hashes == [hashes[1], hashes[3]]


def test_memory_is_bounded_and_what_is_forgotten_is_removed() -> None:
    events = one_group(announced_max=4)
    assert len(hold(events, request_of(3), range(3))) == 1
    stored, removed = hold(events, request_of(3, seed=1), range(3))
    assert stored.block_hashes == request_of(3, seed=1).block_hashes
    assert removed.block_hashes == request_of(2).block_hashes


def test_what_finds_no_room_before_it_is_taken_is_never_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, request = one_group(waiting_max=4), request_of(9)
    with caplog.at_level(logging.WARNING, log.name):
        for _ in range(2):
            events.held(request, 0, range(9), request.block_hashes)
    assert [len(event.block_hashes) for event in events.take()] == [4]
    assert len(caplog.records) == 1
    assert [len(event.block_hashes) for event in hold(events, request, range(9))] == [4]
