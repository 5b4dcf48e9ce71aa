"""A real Prometheus, with the rules that are shipped, scrapes a real daemon under load: panels have data."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.alert_cases import CASES, promtool_tests
from tests.deploy.installation import PLACE
from tests.deploy.prometheus import RULES, Prometheus, answers_of, draw, panels, promtool, question, run_draw
from tests.deploy.prometheus import dashboard as dashboard
from tests.integration.daemon.gpu import ConnectGpu
from tests.integration.daemon.gpu import connect_gpu as connect_gpu
from tests.integration.daemon.gpu import fake as fake
from tests.integration.daemon.gpu import gpu as gpu
from tests.support.plain_client import BLOCKS, PlainClient, block_hashes
from tests.support.process import Daemon

ON_DISK = 12
"""Batches of 1 MiB: fewer than the pool and the disk hold, and more than the pool alone."""


def test_promtool_has_no_complaint() -> None:
    said = promtool("check", "rules", RULES / "rules.yml", RULES / "alerts.yml")
    assert f"{len(CASES)} rules found" in said


def test_each_alert_fires_when_it_should_and_says_what_and_is_quiet_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump(promtool_tests([str(RULES / "rules.yml"), str(RULES / "alerts.yml")])))
    assert "SUCCESS" in promtool("test", "rules", file)


def test_no_alert_is_without_a_case() -> None:
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    assert [case.alert for case in CASES] == [rule["alert"] for group in groups for rule in group["rules"]]


class Load:
    """An engine that stores, hits, misses, loads, and comes back to what only the disk has."""

    def __init__(self, socket_path: Path) -> None:
        self._client = PlainClient(socket_path, "busy").ready()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def _run(self) -> None:
        try:
            batch = 0
            while not self._stop.is_set():
                now = block_hashes("load", range(batch * BLOCKS, (batch + 1) * BLOCKS))
                self._client.store(now)
                self._client.load(now)
                self._client.load([*now[: BLOCKS // 2], *block_hashes("nobody", range(BLOCKS // 2))])
                if batch >= ON_DISK:
                    old = (batch - ON_DISK) * BLOCKS
                    self._client.load(block_hashes("load", range(old, old + BLOCKS)))
                batch += 1
        except BaseException as error:
            self._error = error

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._client.close()
        if self._error is not None:
            raise self._error


def has_data(prometheus: Prometheus, expression: str) -> bool:
    found = prometheus.ask("query", query=question(expression))["result"]
    return any(math.isfinite(float(each["value"][1])) for each in found)


@pytest.fixture
def daemon(socket_dir: Path, shm_dir: Path, gpu: object) -> Iterator[Daemon]:
    disk = socket_dir / "nvme0"
    disk.mkdir(mode=0o700)
    daemon = Daemon(
        socket_dir,
        shm_dir / "pool",
        pool__size="10MiB",
        disk__paths=disk,
        disk__size="66MiB",
        disk__write_mode="through",
        server__session_silence_s=600,
    )
    yield daemon
    if daemon.process.poll() is None:
        daemon.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_panel_has_data_of_a_daemon_under_load(
    daemon: Daemon,
    connect_gpu: ConnectGpu,
    dashboard: dict[str, Any],
    tmp_path: Path,
    proved: Callable[[str], None],
) -> None:
    connect_gpu().ready(instance="on a GPU")
    folder = tmp_path / "prometheus"
    folder.mkdir()
    prometheus = Prometheus(folder, urllib.parse.urlsplit(daemon.metrics_url).netloc)
    try:
        load = Load(daemon.socket)
        try:
            targets = [
                (panel["title"], each["expr"]) for panel in panels(dashboard) for each in panel["targets"]
            ]

            def missing() -> list[tuple[str, str]]:
                return [target for target in targets if not has_data(prometheus, target[1])]

            try:
                prometheus.until(lambda: not missing(), "every panel has data")
            except AssertionError as error:
                raise AssertionError(f"no data: {missing()}") from error
            started_s = time.time()
            prometheus.until(lambda: time.time() > started_s + 30, "there is something to see")
            made = draw(answers_of(prometheus, dashboard), PLACE / "pictures")
            rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
            assert len(made) == len(rows)
            draw_top(daemon)
            proved(f"All {len(targets)} queries of the dashboard have data of a real Prometheus.")
            rules = prometheus.ask("rules")["groups"]
            assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
            firing = {
                each["labels"]["alertname"]
                for each in prometheus.ask("alerts")["alerts"]
                if each["state"] == "firing"
            }
            assert firing == {"KvtierColdStart"}, "it has just been made"
            recorded = [
                rule["name"] for group in rules for rule in group["rules"] if rule["type"] == "recording"
            ]

            def unknown() -> list[str]:
                return [name for name in recorded if not has_data(prometheus, name)]

            # A scrape that came late leaves a gap, and what is recorded of it has one, too.
            prometheus.until(lambda: not unknown(), "every recorded figure has data")
        finally:
            load.close()
        daemon.stop()
        prometheus.until(
            lambda: (
                "KvtierDown" in {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]}
            ),
            "it is seen to be down",
        )
    finally:
        prometheus.close()


def draw_top(daemon: Daemon) -> None:
    """A picture of the second frame of `kvtierctl top`: build/deploy/top.png."""
    command = [sys.executable, "-m", "kvtierd.ctl", "top", "--frames=2", f"--socket={daemon.socket}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    second = "kvtierd" + done.stdout.split("\nkvtierd")[1]
    assert "every 2 s" in second
    assert max(map(len, second.splitlines())) <= 80
    (PLACE / "top.txt").write_text(second)
    run_draw(PLACE / "top.txt", PLACE / "top.png")
    assert (PLACE / "top.png").read_bytes().startswith(b"\x89PNG")
