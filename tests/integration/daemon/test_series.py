"""The series of /metrics are as many after a thousand restarts of engines as after one."""

from __future__ import annotations

import re
import urllib.request
import uuid

from tests.integration.daemon.conftest import Connect
from tests.integration.daemon.raw import hashes
from tests.support.process import DEADLINE_S, Daemon, until

RESTARTS = 40
AT_ONCE = 3


def series(daemon: Daemon) -> set[str]:
    """Names and labels of all samples, as Prometheus keeps them."""
    request = urllib.request.Request(
        daemon.metrics_url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    texts = []
    for asked in (daemon.metrics_url, request):
        with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
            texts.append(answer.read().decode())
    lines = "\n".join(texts).splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def test_restarts_of_engines_under_new_names_make_no_new_series(daemon: Daemon, connect: Connect) -> None:
    ever: set[str] = set()
    most, counted = 0, daemon.metrics()
    for number in range(RESTARTS):
        engines = [connect().ready(instance=f"{uuid.uuid4()}-dp0") for _ in range(AT_ONCE)]
        engines[0].store(hashes(2, seed=number), [0, 1])
        now = series(daemon)
        ever |= now
        most = max(most, len(now))
        for engine in engines:
            engine.close()
        until(lambda: not daemon.status().instances, "all are gone")
        before, counted = counted, daemon.metrics()
        fallen = [name for name, value in before.items() if "_total" in name and counted[name] < value]
        assert fallen == [], "a counter went back"
    assert len(ever) == most, "every restart has the series of the first"
    assert counted["kvtier_epochs_ended_total"] == RESTARTS * AT_ONCE
    assert counted["kvtier_store_blocks_total.host"] == 2 * RESTARTS
    shown = {name for name in ever if name.startswith("kvtier_instance_mapped_bytes")}
    assert shown == {f'kvtier_instance_mapped_bytes{{engine="{number}"}}' for number in (1, 2, 3)}
    assert not [name for name in series(daemon) if "engine=" in name], "nothing is said of what is gone"
    uuids = [name for name in ever if re.search(r"[0-9a-f]{8}-[0-9a-f]{4}", name)]
    assert uuids == []


def test_an_engine_keeps_its_number_while_others_come_and_go(daemon: Daemon, connect: Connect) -> None:
    def numbers() -> dict[str, int]:
        return {each.instance: each.number for each in daemon.status().instances}

    first, second = connect().ready(instance="a"), connect().ready(instance="b")
    assert numbers() == {"a": 1, "b": 2}
    first.close()
    until(lambda: "a" not in numbers(), "a is gone")
    connect().ready(instance="c")
    assert numbers() == {"b": 2, "c": 1}
    second.close()
    until(lambda: "b" not in numbers(), "b is gone")
    connect().ready(instance="d")
    assert numbers() == {"c": 1, "d": 2}


def test_nothing_is_said_of_when_series_were_made(daemon: Daemon) -> None:
    assert [name for name in series(daemon) if "_created" in name] == []
