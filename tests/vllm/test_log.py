"""What the connector writes into an engine's log: that it has attached, to what, and what it will do."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from kvtier_vllm import logs
from kvtier_vllm.config import ConnectorConfig

from tests.support.daemon import until
from tests.vllm.rig import Rig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

VLLM_LINE = re.compile(r"\(\w+ pid=\d+\) (INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] ")


def test_an_engine_says_when_it_has_lost_its_daemon_and_when_it_has_attached_again(rig: Rig) -> None:
    def ours() -> list[str]:
        log = rig.engine.log.read_text(errors="replace").splitlines()
        return [line for line in log if "kvtier" in line and VLLM_LINE.search(line)]

    before = len(ours())
    rig.host.restart()
    rig.wait_ready()
    until(lambda: any("kvtier: attached again to kvtierd" in line for line in ours()[before:]), "it says so")
    new = ours()[before:]
    assert "WARNING" in new[0]
    assert "without it every lookup misses" in new[0]
    [again] = [line for line in new if "attached again" in line]
    assert f"(pid {rig.host.daemon.pid}) at {rig.host.socket}" in again
    assert rig.host.status().instances[0].namespace_digest in again


@pytest.mark.parametrize(
    ("settings", "stores", "loads"),
    [
        ({}, "This engine stores full blocks of prompts and outputs", "it loads what it finds"),
        ({"store": False, "load": False}, "This engine stores nothing", "it loads nothing"),
        (
            {
                "store_tokens": "prompt",
                "max_store_tokens": 4096,
                "store_threshold": 2,
                "tiers": ["host"],
                "ttl_s": 60,
                "min_load_tokens": 256,
                "max_load_tokens": 2048,
            },
            "This engine stores full blocks of prompts, the first 4096 tokens of a request, once 2 requests "
            "have used them, in host memory only, for 60 s",
            "it loads what it finds, at least 256 tokens at once, the first 2048 tokens of a request",
        ),
    ],
    ids=["defaults", "nothing", "limits"],
)
def test_what_it_will_do_is_told(settings: dict[str, Any], stores: str, loads: str) -> None:
    config = ConnectorConfig.parse(settings)
    assert logs.stores(config) == stores
    assert logs.loads(config) == loads


def test_what_a_client_logs_is_handed_to_vllms_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(logs.log, "isEnabledFor", lambda level: level >= logging.INFO)
    monkeypatch.setattr(logs.log, "handle", lambda record: told.append(record.getMessage()))
    logs.adopt_client_log()
    logs.adopt_client_log()
    logging.getLogger("kvtier").info("once")
    logging.getLogger("kvtier").debug("not at this level")
    assert told == ["once"]
