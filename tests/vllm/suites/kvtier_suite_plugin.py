"""A pytest plugin that points vLLM's own connector tests to ours (see tools/vllm_suites.py).

vLLM's tests put a Mock in the connector's place, and script what it matches and what its loads come to. Here
that Mock passes everything that a test does not script on to the KvtierConnector that the scheduler was made
with, so ours hears the whole story (allocations that it never promised, failures, ends) and must neither fail
nor change what vLLM does.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

UTILS = "tests.v1.kv_connector.unit.utils"
OURS = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier_vllm.connector",
    "kv_role": "kv_both",
}
_schedulers: list[Any] = []
_spies: list[Any] = []


class RecordingConnector:
    """Ours, where vLLM's tests want their own that counts calls; a function that makes it, in truth."""

    def __new__(cls, config: Any, role: Any, kv_cache_config: Any) -> Any:
        from kvtier_vllm.connector import KvtierConnector

        class Recording(KvtierConnector):
            call_record: Counter[str]

            def __getattribute__(self, name: str) -> Any:
                found = super().__getattribute__(name)
                if callable(found) and not name.startswith("_") and name != "call_record":
                    super().__getattribute__("call_record")[name] += 1
                return found

        made = Recording.__new__(Recording)
        object.__setattr__(made, "call_record", Counter())
        made.__init__(config, role, kv_cache_config)  # type: ignore[misc]
        return made


def pytest_configure(config: pytest.Config) -> None:
    """Before the test modules take the names."""
    utils: Any = importlib.import_module(UTILS)
    make_config, make_scheduler, make_mock = (
        utils.create_vllm_config,
        utils.create_scheduler,
        utils.create_mock_connector,
    )

    def create_vllm_config(*arguments: Any, **named: Any) -> Any:
        named.setdefault("model", os.environ["KVTIER_SUITE_MODEL"])
        if named.get("kv_connector") == "TestExampleConnector":
            named["kv_connector_extra_config"] = {}
        else:
            named |= OURS
        extra = {"socket": os.environ["KVTIER_SUITE_SOCKET"]}
        made = make_config(*arguments, **named | {"kv_connector_extra_config": extra})
        made.model_config.skip_tokenizer_init = True
        return made

    def create_scheduler(*arguments: Any, **named: Any) -> Any:
        _schedulers.append(make_scheduler(*arguments, **named))
        return _schedulers[-1]

    def create_mock_connector() -> Any:
        scripted = make_mock()
        ours = _schedulers[-1].connector
        spy = Mock(wraps=ours)
        spy.get_external_cache_hit_sources.side_effect = scripted.get_external_cache_hit_sources.side_effect
        _spies.append((spy, ours))
        return spy

    utils.create_vllm_config, utils.create_scheduler = create_vllm_config, create_scheduler
    utils.create_mock_connector = create_mock_connector
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry["TestExampleConnector"] = lambda: RecordingConnector


@pytest.fixture(autouse=True)
def ours_is_well() -> Iterator[None]:
    """After each test: our connector was there, heard of it, and is not switched off."""
    yield
    spies, schedulers = list(_spies), list(_schedulers)
    _spies.clear()
    _schedulers.clear()
    for spy, ours in spies:
        assert type(ours).__name__ == "KvtierConnector"
        assert ours._off is None, f"switched off: {ours._off}"
        heard = {call[0] for call in spy.method_calls}
        assert {"build_connector_meta", "update_state_after_alloc"} <= heard, heard
    for scheduler in schedulers:
        scheduler.shutdown()
