"""LoRA: blocks of an adapter are shared by what its files hold, and by nothing less certain."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvtier_vllm.adapters import ADAPTERS_MAX, Adapters, DerivedKeys
from kvtier_vllm.namespace import UnsupportedConfiguration, derive
from kvtier_vllm.weights import local_revision
from safetensors.numpy import save_file

from tests.support.daemon import until
from tests.vllm.mini_engine import TOKENS, MiniEngine
from tests.vllm.rig import prompt
from tests.vllm.test_control import compute
from tests.vllm.test_simulation import all_came_back, host, make

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

LENGTH, WHOLE = 6 * TOKENS + 5, 6 * TOKENS
HASHES = [bytes([number]) * 32 for number in range(6)]


def write_adapter(folder: Path, weights: int = 0, rank: int = 8) -> Path:
    """An adapter's files; equal arguments, equal content."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    fresh = folder / "fresh"
    save_file({"lora_A.weight": np.full((rank, 16), weights, np.float16)}, fresh)
    os.replace(fresh, folder / "adapter_model.safetensors")
    return folder


def lora_request(folder: Path, name: str = "one", number: int = 1) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder))


def asking(folder: Path, **which: Any) -> Any:
    """As much of a request as its keys depend on."""
    return SimpleNamespace(lora_request=lora_request(folder, **which))


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

    def known(self, request: Any) -> list[bytes]:
        """Once the files are read."""
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


def test_no_more_adapters_are_remembered_than_that(keyring: Keyring, tmp_path: Path) -> None:
    for number in range(ADAPTERS_MAX + 5):
        keyring.keys(asking(tmp_path / f"{number}", number=number + 1))
    assert len(keyring.adapters._known) == ADAPTERS_MAX


# --- in an engine ---


def with_adapters(make: Callable[..., MiniEngine], salt: str | None = None) -> MiniEngine:
    changes = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    return make(salt=salt, changes=changes, adapters="files")


class Shared:
    """What requests find of each other in kvtierd, in an engine that forgets everything itself."""

    def __init__(self, engine: MiniEngine) -> None:
        self.engine = engine
        self._count = 0

    def found(self, folder: Path | None = None, **which: Any) -> int:
        """Tokens that a request is spared."""
        self.engine.forget()
        self._count += 1
        request = {} if folder is None else {"lora_request": lora_request(folder, **which)}
        return compute(self.engine, f"r{self._count}", prompt(LENGTH), **request)

    def identified(self, folder: Path, **which: Any) -> None:
        """Waits until the adapter's files are read."""
        adapters = self.engine.connector._scheduler._adapters
        until(lambda: adapters.keys(asking(folder, **which)) is not None, "the adapter is identified")


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
    import vllm

    from tests.vllm.mini_engine import engine_config

    config = engine_config(model, None, enable_lora=True, max_lora_rank=16)
    with pytest.raises(UnsupportedConfiguration, match='set adapters to "files"'):
        derive(config, vllm.__version__)
    plain = derive(engine_config(model, None), vllm.__version__)
    assert derive(config, vllm.__version__, adapters_by_files=True).adapter
    assert derive(config, vllm.__version__, adapters_by_files=True) != plain
