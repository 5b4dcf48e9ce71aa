"""Debian's Prometheus, and the dashboard's questions to it."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.installation import PLACE, REPO, UV
from tests.deploy.tools import debian

RULES = REPO / "deploy" / "prometheus"
DASHBOARD = REPO / "deploy" / "grafana" / "kvtier.json"
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded = json.loads(DASHBOARD.read_text())
    assert isinstance(loaded, dict)
    return loaded


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def promtool(*arguments: object) -> str:
    command = [str(debian("promtool")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """Debian's, scraping one daemon every second."""

    def __init__(self, folder: Path, target: str) -> None:
        rules = []
        for name in ("rules.yml", "alerts.yml"):
            text = (RULES / name).read_text().replace("interval: 15s", "interval: 1s")
            (folder / name).write_text(text)
            rules.append(name)
        scrape = {
            "job_name": "kvtier",
            "static_configs": [{"targets": [target], "labels": {"instance": "host-1"}}],
        }
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": rules,
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        promtool("check", "config", folder / "prometheus.yml")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                str(debian("prometheus")),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._url.removeprefix('http://')}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.until(self._is_ready, "Prometheus is ready")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its API."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                self._log.seek(0)
                raise AssertionError(f"still not: {what}\n{self._log.read()[-4_000:]}")
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def question(expression: str, rate_s: int = 10) -> str:
    """A panel's query with its variables filled in, as Grafana would."""
    filled = (
        expression.replace("$__rate_interval", f"{rate_s}s").replace("$job", ".*").replace("$instance", ".*")
    )
    assert "$" not in filled, expression
    return filled


def answers_of(
    prometheus: Prometheus,
    dashboard: dict[str, Any],
    events: Sequence[tuple[float, str]] = (),
    *,
    window_s: float = 60,
    step_s: int = 1,
    rate_s: int = 10,
) -> dict[str, Any]:
    """What Prometheus says to every panel about the last `window_s` seconds, for `draw.py`."""
    end_s = time.time()
    answers = {}
    for panel in panels(dashboard):
        series = []
        for target in panel["targets"]:
            window = {"start": end_s - window_s, "end": end_s, "step": step_s}
            asked = question(target["expr"], rate_s)
            for each in prometheus.ask("query_range", query=asked, **window)["result"]:
                metric = each["metric"]
                label = target["legendFormat"]
                for name in re.findall(r"\{\{(\w+)\}\}", label):
                    label = label.replace(f"{{{{{name}}}}}", metric.get(name, ""))
                values = [[time_s, float(value)] for time_s, value in each["values"]]
                if any(math.isfinite(value) for _, value in values):
                    series.append({"label": label, "values": values})
        answers[str(panel["id"])] = series
    return {"panels": answers, "events": list(events), "window": [end_s - window_s, end_s]}


def draw(answers: dict[str, Any], folder: Path) -> list[Path]:
    """A picture of each row of the dashboard."""
    PLACE.mkdir(parents=True, exist_ok=True)
    (PLACE / "answers.json").write_text(json.dumps(answers))
    run_draw(DASHBOARD, PLACE / "answers.json", folder)
    made = sorted(folder.glob("dashboard-*.png"))
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in made)
    return made


def run_draw(*files: Path) -> None:
    command = [str(UV), "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable]
    command += ["--with", "matplotlib", "python", str(Path(__file__).with_name("draw.py")), *map(str, files)]
    subprocess.run(command, check=True, timeout=300)
