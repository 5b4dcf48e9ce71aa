"""LoRA: blocks of an adapter are shared by what its files hold, and by nothing less certain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import vllm
from kvtier_engine.weights import local_revision
from kvtier_vllm.model import adapter_loads
from kvtier_vllm.model.adapter_loads import AdapterId, AdapterLoad, LoadedAdapters, proof_of
from kvtier_vllm.model.adapters import ADAPTERS_MAX, Adapters, DerivedKeys
from kvtier_vllm.model.namespace import UnsupportedConfiguration, derive, version_of

from tests.support.daemon import until
from tests.vllm.mini_adapters import LENGTH, WHOLE, Shared, asking, lora_request, write_adapter
from tests.vllm.mini_engine import TOKENS, MiniEngine
from tests.vllm.mini_rig import all_came_back, compute
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

HASHES = [bytes([number]) * 32 for number in range(6)]


class Keyring:
    """Adapters, and what they log."""

    def __init__(self, **options: Any) -> None:
        self.said: list[str] = []
        log = logging.Logger("adapters")
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)
        self.adapters = Adapters(log, **options)

    def keys(self, request: Any) -> list[bytes] | None:
        keys = self.adapters.keys(request)
        return None if keys is None else list(keys(HASHES))

    def load(self, request: Any) -> set[AdapterId]:
        """As a worker that reads its files now says it."""
        lora = request.lora_request
        adapter = (lora.lora_int_id, lora.lora_path)
        return self.adapters.loaded([AdapterLoad(adapter, proof_of(lora.lora_path))])

    def wait_read(self) -> None:
        """Until the files of all adapters are digested."""
        readings = [each.revision for each in self.adapters._known.values() if each.revision is not None]
        until(lambda: all(each.done() for each in readings), "its files are read")

    def known(self, request: Any) -> list[bytes]:
        """Once the files are loaded and read."""
        self.load(request)
        until(lambda: self.adapters.keys(request) is not None, "the adapter is identified")
        found = self.keys(request)
        assert found is not None
        return found


@pytest.fixture
def keyring() -> Keyring:
    return Keyring()


def test_without_an_adapter_vllms_hashes_are_the_keys(keyring: Keyring) -> None:
    assert keyring.keys(SimpleNamespace(lora_request=None)) == HASHES
    assert keyring.keys(SimpleNamespace()) == HASHES


def test_keys_follow_from_the_files_and_from_nothing_else(keyring: Keyring, tmp_path: Path) -> None:
    one = keyring.known(asking(write_adapter(tmp_path / "one", 1)))
    copy = keyring.known(asking(write_adapter(tmp_path / "copy", 1), name="copy", number=2))
    other = keyring.known(asking(write_adapter(tmp_path / "other", 2), name="other", number=3))
    wider = keyring.known(asking(write_adapter(tmp_path / "wider", 1, rank=16), name="wider", number=4))
    assert one == copy
    assert Keyring().known(asking(tmp_path / "one")) == one, "in another engine as well"
    assert len({*one, *other, *wider, *HASHES}) == 4 * len(HASHES), "no block of one is a block of another"
    assert {len(key) for key in one} == {32}
    assert keyring.said == []


def test_keys_are_as_long_as_the_hashes_and_slices_are_lists() -> None:
    hashes = [bytes([number]) * 16 for number in range(9)]
    keys = DerivedKeys(hashes, b"revision", {})
    assert len(keys) == 9
    assert [len(key) for key in keys] == [16] * 9
    whole = list(keys)
    assert (keys[2:5], keys[3::4], keys[-1], keys[:0]) == (whole[2:5], whole[3::4], whole[8], [])
    hashes.append(b"x" * 16)
    assert len(keys) == 10, "a request's hashes grow"
    assert list(keys)[:9] == whole


def test_keys_of_what_was_stored_are_known_without_a_look_at_the_files(
    keyring: Keyring, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1)
    request, known_keys = asking(folder), keyring.adapters.known_keys
    assert known_keys(request) is None
    found = keyring.known(request)
    (folder / "adapter_model.safetensors").unlink()
    keys = known_keys(request)
    assert keys is not None
    assert list(keys(HASHES)) == found
    assert keyring.keys(request) is None
    assert known_keys(request) is None, "now it is known that they have changed"
    plain = known_keys(SimpleNamespace(lora_request=None))
    assert plain is not None
    assert plain(HASHES) == HASHES
    nowhere = asking(tmp_path / "nowhere", name="nowhere")
    assert keyring.keys(nowhere) is None
    assert known_keys(nowhere) is None


@pytest.mark.parametrize("broken", ["nothing there", "no safetensors"])
def test_what_cannot_be_identified_is_left_alone_and_said_once(
    keyring: Keyring, tmp_path: Path, broken: str
) -> None:
    folder = tmp_path / "adapter"
    if broken == "no safetensors":
        (write_adapter(folder) / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    for _ in range(3):
        assert keyring.keys(asking(folder)) is None
    [said] = keyring.said
    assert "what adapter 'one' computes is not cached" in said


def test_files_that_change_while_an_engine_lives_end_it(keyring: Keyring, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", 1)
    keyring.known(asking(folder))
    write_adapter(folder, 2)
    assert keyring.keys(asking(folder)) is None
    write_adapter(folder, 1)
    assert keyring.keys(asking(folder)) is None, "nobody knows what the engine has in its memory now"
    assert len(keyring.said) == 1
    assert keyring.known(asking(folder, name="loaded anew", number=2))


def test_files_that_vanish_likewise(keyring: Keyring, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", 1)
    keyring.known(asking(folder))
    (folder / "adapter_model.safetensors").unlink()
    assert keyring.keys(asking(folder)) is None


def test_files_that_change_while_they_are_read_are_not_believed(tmp_path: Path) -> None:
    begun, changed = threading.Event(), threading.Event()

    def identify(folder: Path) -> str:
        begun.set()
        assert changed.wait(60)
        return local_revision(folder)

    keyring, folder = Keyring(identify=identify), write_adapter(tmp_path / "one", 1)
    assert keyring.keys(asking(folder)) is None
    assert begun.wait(60)
    write_adapter(folder, 2)
    changed.set()
    assert keyring.keys(asking(folder)) is None
    assert len(keyring.said) == 1


def test_nobody_waits_for_the_reading(tmp_path: Path) -> None:
    go_on = threading.Event()
    keyring = Keyring(identify=lambda folder: local_revision(folder) if go_on.wait(60) else "")
    request = asking(write_adapter(tmp_path / "one"))
    assert keyring.keys(request) is None
    assert keyring.keys(request) is None
    go_on.set()
    assert keyring.known(request)
    keyring.adapters.close()


def test_what_no_worker_has_loaded_has_no_keys(keyring: Keyring, tmp_path: Path) -> None:
    request = asking(write_adapter(tmp_path / "one", 1))
    assert keyring.keys(request) is None
    keyring.wait_read()
    assert keyring.keys(request) is None, "the files of today may not be the ones that it will load"
    keyring.load(request)
    assert keyring.keys(request)


def test_files_that_changed_before_the_first_request_are_not_what_was_loaded(
    keyring: Keyring, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1)
    keyring.adapters.world_size = 2
    request = asking(folder)
    loads = [AdapterLoad((1, str(folder)), proof_of(str(folder)))]
    keyring.adapters.loaded(loads)
    write_adapter(folder, 2)
    assert keyring.adapters.loaded([AdapterLoad(loads[0].adapter, proof_of(str(folder)))]) == {
        loads[0].adapter
    }, "two workers with different weights"
    assert keyring.keys(request) is None
    [said] = keyring.said
    assert "'one'" in said
    alone = Keyring()
    alone.adapters.loaded(loads)
    assert alone.keys(request) is None
    assert "have changed since" in alone.said[0]


def test_every_worker_has_to_have_loaded_it(tmp_path: Path) -> None:
    keyring, request = Keyring(world_size=2), asking(write_adapter(tmp_path / "one", 1))
    keyring.load(request)
    keyring.wait_read()
    assert keyring.keys(request) is None
    keyring.load(request)
    assert keyring.keys(request)


def test_a_number_that_gets_another_folder_ends_the_one_before(keyring: Keyring, tmp_path: Path) -> None:
    old, new = asking(write_adapter(tmp_path / "old", 1)), asking(write_adapter(tmp_path / "new", 2))
    keyring.known(old)
    assert keyring.load(new) == {(1, str(tmp_path / "old"))}
    assert keyring.keys(old) is None
    assert keyring.known(new)
    assert keyring.load(old) == {(1, str(tmp_path / "new"))}
    assert keyring.keys(old) is None, "its requests of before have blocks of both in the engine's own cache"
    assert keyring.keys(new) is None
    assert len(keyring.said) == 2


def test_what_is_told_at_once_need_not_be_told_again(keyring: Keyring, tmp_path: Path) -> None:
    old, new = asking(write_adapter(tmp_path / "old", 1)), asking(write_adapter(tmp_path / "new", 2))
    loads = [AdapterLoad((1, each.lora_request.lora_path), b"proof") for each in (old, new)]
    assert keyring.adapters.loaded(loads[:1], at_once=True) == set()
    assert keyring.adapters.loaded(loads[1:], at_once=True) == {loads[0].adapter}
    assert keyring.adapters.loaded(loads) == set(), "the same, with the step's results"
    assert not keyring.adapters._loaded[loads[1].adapter].ended


def test_one_name_for_two_adapters_is_not_enough_where_hashes_have_nothing_else(tmp_path: Path) -> None:
    keyring = Keyring(names_alone=True)
    one = asking(write_adapter(tmp_path / "one", 1))
    other = asking(write_adapter(tmp_path / "other", 2), number=2)
    third = asking(write_adapter(tmp_path / "third", 2), name="third", number=3)
    assert keyring.known(one)
    keyring.load(other)
    assert keyring.keys(other) is None
    assert keyring.known(one)
    assert keyring.known(third)
    assert "same name" in keyring.said[0]


def test_a_worker_tells_each_adapter_once_and_knows_which_have_ended() -> None:
    worker = LoadedAdapters()
    one, same_number, other = (1, "/a"), (1, "/b"), (2, "/c")
    assert worker.loaded(one, b"1") == AdapterLoad(one, b"1")
    assert worker.loaded(one, b"1") is None, "it was not needed for a while, and is loaded again"
    assert worker.loaded(other, b"3")
    assert worker.take() == [AdapterLoad(one, b"1"), AdapterLoad(other, b"3")]
    assert not worker.has_news
    assert not worker.has_ended(one)
    assert worker.loaded(same_number, b"2")
    assert [worker.has_ended(each) for each in (one, same_number, other, None)] == [True, False, False, False]
    assert worker.loaded(other, b"4"), "other files, in the same place"
    assert worker.has_ended(other)
    unknown = LoadedAdapters()
    unknown.loaded(one, b"")
    unknown.loaded(one, b"")
    assert unknown.has_ended(one), "nobody knows whether it has read the same"


class Told:
    """Listens as a half of a connector does."""

    lora_config: Any = None

    def __init__(self) -> None:
        self.loads: list[tuple[AdapterId, bytes]] = []

    def adapter_loaded(self, adapter: AdapterId, proof: bytes) -> None:
        self.loads.append((adapter, proof))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_load_by_vllms_worker_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replaced: bool
) -> None:
    """vLLM's own manager of adapters, whose `_load_adapter` reads nothing here, and (`replaced`) is overtaken
    by somebody who writes there meanwhile."""
    from vllm.lora import worker_manager

    folder = write_adapter(tmp_path / "one", 1)

    def read(manager: Any, request: Any) -> Any:
        if replaced:
            write_adapter(folder, 2)
        return SimpleNamespace(id=request.lora_int_id)

    monkeypatch.setattr(worker_manager.WorkerLoRAManager, "_load_adapter", read)
    told, others = Told(), Told()
    for listener in (told, others):
        adapter_loads.listen(listener)
    manager = object.__new__(worker_manager.LRUCacheWorkerLoRAManager)
    manager.lora_config = told.lora_config = SimpleNamespace()
    manager._adapter_manager = MagicMock(capacity=8, **{"__len__.return_value": 0})
    manager._adapter_manager.list_adapters.return_value = {}
    manager.add_adapter(lora_request(folder))
    assert told.loads == [((1, str(folder)), b"" if replaced else proof_of(str(folder)))]
    assert others.loads == [], "another engine of this process"


def test_memory_of_what_was_loaded_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_vllm.model.adapter_loads.LOADED_MAX", 8)
    worker, keyring = LoadedAdapters(), Keyring(names_alone=True)
    for number in range(20):
        worker.loaded((number, "/a"), b"1")
        worker.loaded((1, f"/{number}"), b"1")
        keyring.adapters.loaded(worker.take())
        keyring.keys(asking(Path(f"/{number}"), name=str(number), number=number + 1))
    sizes = [len(each) for each in (worker._current, worker._ended)]
    sizes += [len(each) for each in (keyring.adapters._loaded, keyring.adapters._paths)]
    assert max(*sizes, len(keyring.adapters._names)) <= 8


def test_no_more_adapters_are_remembered_than_that(keyring: Keyring, tmp_path: Path) -> None:
    for number in range(ADAPTERS_MAX + 5):
        keyring.keys(asking(tmp_path / f"{number}", number=number + 1))
    assert len(keyring.adapters._known) == ADAPTERS_MAX


# --- in an engine ---


def with_adapters(
    make: Callable[..., MiniEngine], salt: str | None = None, ahead: bool = False
) -> MiniEngine:
    changes = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "async_scheduling": ahead}
    return make(salt=salt, changes=changes, adapters="files")


def test_an_adapter_finds_its_own_blocks(make: Callable[..., MiniEngine], tmp_path: Path) -> None:
    shared = Shared(with_adapters(make))
    one, other = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "other", 2)
    for folder, number in ((one, 1), (other, 2)):
        shared.identified(folder, name=folder.name, number=number)
    assert shared.found() == 0
    assert shared.found(one) == 0
    assert shared.found(other, name="other", number=2) == 0
    assert shared.found() == WHOLE
    assert shared.found(one) == WHOLE
    assert shared.found(other, name="other", number=2) == WHOLE
    all_came_back(shared.engine)


def test_other_weights_under_the_same_name_and_path_are_another_adapter(
    make: Callable[..., MiniEngine], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1)
    first = Shared(with_adapters(make, salt=str(tmp_path)))
    first.identified(folder)
    assert first.found(folder) == 0
    assert first.found(folder) == WHOLE
    write_adapter(folder, 2)
    assert first.found(folder) == 0, "this engine may have either"
    second = Shared(with_adapters(make, salt=str(tmp_path)))
    second.identified(folder)
    assert second.found(folder) == 0, "this one has the new weights"
    assert second.found(folder) == WHOLE
    write_adapter(folder, 1)
    third = Shared(with_adapters(make, salt=str(tmp_path)))
    third.identified(folder)
    assert third.found(folder) == WHOLE, "and this one the old ones again"
    for each in (first, second, third):
        all_came_back(each.engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_stored_any_more_as_what_a_running_request_began_with(
    make: Callable[..., MiniEngine], tmp_path: Path, ahead: bool
) -> None:
    old, new = write_adapter(tmp_path / "old", 1), write_adapter(tmp_path / "new", 2)
    salt, more = str(tmp_path), 6 * TOKENS
    first, second = Shared(with_adapters(make, salt, ahead)), Shared(with_adapters(make, salt, ahead))
    for shared in (first, second):
        shared.identified(old)
    engine = first.engine
    engine.add("running", prompt(LENGTH), max_tokens=more, lora_request=lora_request(old))
    for _ in range(TOKENS):
        engine.step()
    engine.load_adapter(lora_request(new), in_place=True)
    engine.run()
    whole = prompt(LENGTH) + engine.finished["running"]
    known = compute(second.engine, "whole", whole, lora_request=lora_request(old))
    assert known <= LENGTH + TOKENS, "steps before the swap"
    until(lambda: engine.connector._scheduler.storing, "it stores again, after some were withdrawn")
    if version_of(vllm.__version__) >= (0, 31):
        first.identified(new)
        assert first.found(new) == 0
        assert first.found(new) == WHOLE, "the new one is shared"
    else:  # hashes carry no folder
        assert [first.found(new) for _ in range(2)] == [0, 0]
    for shared in (first, second):
        all_came_back(shared.engine)


def test_what_was_computed_while_the_files_were_read_is_stored_all_the_same(
    make: Callable[..., MiniEngine], tmp_path: Path
) -> None:
    engine = with_adapters(make)
    go_on = threading.Event()
    adapters = engine.connector._scheduler._adapters
    adapters.identify = lambda folder: local_revision(folder) if go_on.wait(60) else ""
    folder = write_adapter(tmp_path / "one")
    engine.add("first", prompt(LENGTH), max_tokens=20, lora_request=lora_request(folder))
    for _ in range(5):
        engine.step()
    go_on.set()
    Shared(engine).identified(folder)
    engine.run()
    shared = Shared(engine)
    assert shared.found(folder) == WHOLE
    all_came_back(engine)


def test_an_engine_with_adapters_is_refused_unless_they_go_by_their_files(model: Path) -> None:

    from tests.vllm.mini_engine import engine_config

    config = engine_config(model, None, enable_lora=True, max_lora_rank=16)
    with pytest.raises(UnsupportedConfiguration, match='set adapters to "files"'):
        derive(config, vllm.__version__)
    plain = derive(engine_config(model, None), vllm.__version__)
    assert derive(config, vllm.__version__, adapters_by_files=True).adapter
    assert derive(config, vllm.__version__, adapters_by_files=True) != plain
