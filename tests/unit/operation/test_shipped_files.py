"""What is shipped under deploy/ and docs/ fits the program: what can be seen without any tool of others."""

from __future__ import annotations

import ast
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kvtierd.config import daemon as config
from kvtierd.config.reload import LIVE
from kvtierd.metrics import DECLARED, MetricKind
from kvtierd.preflight import host

from tools import configure_page

REPO = Path(__file__).resolve().parents[3]
SYSTEMD = REPO / "deploy" / "systemd"
RULES = REPO / "deploy" / "prometheus"
DOCS = REPO / "docs"
DASHBOARD = json.loads((REPO / "deploy" / "grafana" / "kvtier.json").read_text())


def samples() -> set[str]:
    """Names that Prometheus knows metrics by."""
    endings = {
        MetricKind.GAUGE: ("",),
        MetricKind.COUNTER: ("_total",),
        MetricKind.SUMMARY: ("_sum", "_count"),
        MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    }
    return {each.name + ending for each in DECLARED for ending in endings[each.kind]}


def rules() -> list[dict[str, str]]:
    files = [yaml.safe_load((RULES / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def test_the_example_configuration_is_sound_with_every_line_that_is_commented_out(tmp_path: Path) -> None:
    text = (SYSTEMD / "kvtierd.toml").read_text()
    assert config.load(SYSTEMD / "kvtierd.toml", environ={}).config.server.group == "kvtier"
    whole = re.sub(r"^# (\[\w+\]|\w+ = .*)$", r"\1", text, flags=re.MULTILINE)
    assert whole != text
    (tmp_path / "whole.toml").write_text(whole)
    assert config.load(tmp_path / "whole.toml", environ={}).config.disk.paths


def test_the_example_marks_the_settings_that_change_live() -> None:
    section = ""
    marked, given = set(), set()
    lines = (SYSTEMD / "kvtierd.toml").read_text().splitlines()
    for number, line in enumerate(lines):
        plain = line.removeprefix("# ")
        if found := re.fullmatch(r"\[(\w+)\]", plain):
            section = found[1]
        elif found := re.fullmatch(r"(\w+) = .*", plain):
            key = f"{section}.{found[1]}"
            given.add(key)
            if lines[number - 1].startswith("# (live)"):
                marked.add(key)
    assert marked == given & set(LIVE)


def test_the_documentation_names_the_settings_that_change_live() -> None:
    page = (DOCS / "operate.md").read_text()
    paragraph = page[page.index("Live: ") : page.index("A reload with")]
    assert set(re.findall(r"`(\w+\.\w+)`", paragraph)) == set(LIVE)


def test_the_page_of_settings_is_what_the_program_declares() -> None:
    assert (DOCS / "configure.md").read_text() == configure_page.page(), "python -m tools.configure_page"


def test_every_alert_is_explained() -> None:
    page = (DOCS / "operate.md").read_text()
    assert not [rule["alert"] for rule in rules() if "alert" in rule and f"**{rule['alert']}**" not in page]


def test_rules_and_panels_ask_only_for_metrics_that_there_are() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules()]
    expressions += [each["expr"] for panel in DASHBOARD["panels"] for each in panel.get("targets", ())]
    for expression in expressions:
        asked = set(re.findall(r"\bkvtier[a-z0-9_:]+", expression))
        assert asked <= samples() | recorded, expression


def test_panels_do_not_overlap_and_fill_their_rows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(taken) == 24 * (max(y for _, y in taken) + 1)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_row_of_the_dashboard_has_a_picture_that_can_be_read_as_it_is() -> None:
    page = (DOCS / "operate.md").read_text()
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    wanted = {f"dashboard-{row.lower().replace(' ', '-')}.png" for row in rows}
    assert set(re.findall(r"!\[[^]]+\]\((dashboard[^)]*\.png)\)", page)) == wanted
    assert {path.name for path in DOCS.glob("dashboard*.png")} == wanted
    for name in wanted:
        width, height = struct.unpack(">II", (DOCS / name).read_bytes()[16:24])
        assert width <= 1_100, "a page shows it without making it smaller"
        assert height <= 700, "a screen holds it"


class TestKernel:
    """Everything that people read names the same kernels: those that the code goes by."""

    NEEDED = (".".join(map(str, host.KERNEL_MIN)), ".".join(map(str, host.KERNEL_MIN_CONTAINERS)))
    SENTENCE = (
        f"Linux {NEEDED[0]} or later, {NEEDED[1]} or later where engines run in containers of their own"
    )
    NAMED = re.compile(
        r"\b(?:linux|kernels?)\b(?:(?!Python)[^.;|\n]){0,40}?\b([2-9]\.\d{1,2})\b(?!\.\d)", re.IGNORECASE
    )
    MEASURED_ON = "6.18"
    """Where figures come from."""

    def test_requirements_are_one_sentence(self) -> None:
        for page in (REPO / "README.md", DOCS / "install.md"):
            assert self.SENTENCE in page.read_text(), f"{page.name} says what the code needs"

    def test_no_text_names_another_kernel(self) -> None:
        found = {name: set(self.NAMED.findall(text)) for name, text in _texts_for_people()}
        assert {
            name: named for name, named in found.items() if named - {*self.NEEDED, self.MEASURED_ON}
        } == {}
        assert sum(bool(named) for named in found.values()) >= 4, "the expression finds what is said"


class TestInstalling:
    """There is no package of this name on an index: nobody is told to install one from there."""

    FROM_AN_INDEX = re.compile(
        r"\b(?:pip3?|uvx?|pipx|poetry|conda)\b[^\n]{0,40}?\b(?:install|add|download|run)\b[^\n]{0,60}?"
        r"(?<![\w./-])kvtier(?![\w./-])"
    )

    @pytest.mark.parametrize(
        "said",
        [
            "pip install kvtier",
            "pip install 'kvtier[daemon]'",
            "python -m pip install --upgrade kvtier==0.1.0",
            "# vLLM's image, and `pip install kvtier` in it",
            "uv add kvtier",
            "uv pip install --system kvtier[daemon]>=0.1",
        ],
    )
    def test_the_expression_finds_it(self, said: str) -> None:
        assert self.named(said) != []

    @pytest.mark.parametrize(
        "said",
        [
            "pip install '.[daemon]'",
            "pip uninstall kvtier",
            "python3.11 -m pip install '/dist/kvtier-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl[daemon]'",
            "/opt/kvtier/bin/pip install '/src[daemon]'",
        ],
    )
    def test_the_expression_finds_nothing_else(self, said: str) -> None:
        assert self.named(said) == []

    def test_no_text_tells_people_to(self) -> None:
        found = {name: named for name, text in _texts_for_people() if (named := self.named(text))}
        assert found == {}

    def named(self, text: str) -> list[str]:
        return [match[0] for match in self.FROM_AN_INDEX.finditer(text)]


def _texts_for_people() -> Iterator[tuple[str, str]]:
    """Documents, shipped files, and what programs say: strings that are no docstrings."""
    shipped = [path for path in (REPO / "deploy").rglob("*") if path.is_file() and path.suffix != ".json"]
    pages = [*REPO.glob("*.md"), REPO / "pyproject.toml", REPO / "Makefile", *DOCS.rglob("*.md")]
    readmes = [*(REPO / "tests").rglob("README.md"), *(REPO / "examples").glob("*.md")]
    for path in [*pages, *readmes, *shipped]:
        yield str(path.relative_to(REPO)), path.read_text()
    for path in [
        path for root in ("daemon", "clients", "kernels", "tools") for path in (REPO / root).rglob("*.py")
    ]:
        tree = ast.parse(path.read_text())
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        said = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
        ]
        yield str(path.relative_to(REPO)), "\n".join(said)
