"""The documentation as a whole: its site builds, its links lead somewhere, its lines can be read."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier_vllm.config import ConnectorConfig

from tools import docs_site
from tools.docs_site import REPO
from tools.draw_figures import DRAWINGS, FIGURES, digest

COLUMNS = 100
LINES = {"README.md": 100, "ARCHITECTURE.md": 200}
"""What a reader is promised to get through."""
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
ELSEWHERE = ("build", "dist")


def pages() -> list[Path]:
    """Every Markdown file of the repository that somebody has written."""
    tops = [path for path in REPO.iterdir() if path.name not in ELSEWHERE and not path.name.startswith(".")]
    found = [path for top in tops if top.is_dir() for path in top.rglob("*.md")]
    written = [path for path in found if "results" not in path.parts or path.name == "README.md"]
    return sorted([*written, *(path for path in tops if path.suffix == ".md")])


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Its lines outside of code blocks, by number."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for _, line in prose(page):
        if heading := re.match(r"#+ (.+)", line):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = found[name] = found.get(name, -1) + 1
            names.add(f"{name}-{count}" if count else name)
    return names


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    docs_site.stage(out)
    return out


def test_the_site_builds_and_its_links_and_anchors_lead_somewhere() -> None:
    docs_site.stage(docs_site.SOURCE)
    built = docs_site.build()
    assert built.returncode == 0, built.stdout
    assert (docs_site.SITE / "docs" / "vllm" / "index.html").exists()


def test_a_link_that_leads_nowhere_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    docs_site.stage(docs_site.SOURCE)
    page = docs_site.SOURCE / "docs" / "faq.md"
    page.write_text(page.read_text() + "\n[nowhere](vllm.md#no-such-heading)\n")
    assert docs_site.build().returncode != 0


def test_every_page_is_in_the_navigation(staged: Path) -> None:
    def targets(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from targets(value)
        elif isinstance(entry, list):
            for value in entry:
                yield from targets(value)

    navigation = tomllib.loads((REPO / "zensical.toml").read_text())["project"]["nav"]
    named = list(targets(navigation))
    there = {str(path.relative_to(staged)) for path in staged.rglob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) == there


def test_links_are_those_of_the_repository_too() -> None:
    """GitHub shows the files where they lie, and makes its anchors in its own way."""
    wrong = []
    for page in pages():
        for _, line in prose(page):
            for target, anchor in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                if "://" in target or target.startswith("mailto:"):
                    continue
                path = (page.parent / target).resolve() if target else page
                if not path.exists():
                    if str(path.relative_to(REPO)) not in docs_site.AWAITED:
                        wrong.append(f"{page.relative_to(REPO)}: {target}")
                elif anchor and anchor not in anchors(path):
                    wrong.append(f"{page.relative_to(REPO)}: {target}#{anchor}")
    assert not wrong


def test_lines_wrap_at_a_hundred_columns() -> None:
    """Tables, code, and the targets of links excepted."""
    long = [
        f"{page.relative_to(REPO)}:{number}"
        for page in pages()
        for number, line in prose(page)
        if not line.lstrip().startswith("|") and len(re.sub(r"\]\([^)]*\)", "]", line).rstrip()) > COLUMNS
    ]
    assert not long, "tools to wrap them: CONTRIBUTING.md"


@pytest.mark.parametrize("name", LINES)
def test_the_first_pages_stay_short(name: str) -> None:
    assert len((REPO / name).read_text().splitlines()) <= LINES[name]


@dataclasses.dataclass(frozen=True)
class Walk:
    """A walk through the code, as ARCHITECTURE.md tells it."""

    said: int
    """How many files it says that it has."""
    steps: tuple[str, ...]

    @property
    def files(self) -> set[str]:
        return {file for step in self.steps for file in files_in(step)}


def files_in(step: str) -> list[str]:
    return [target for target, _ in LINK.findall(step) if target.endswith((".py", ".cpp"))]


def functions_in(step: str) -> list[str]:
    """Written with parentheses: `Cache.handle()`, `load_of()`, `CopyPlan::scatter()`."""
    return re.findall(r"`([\w.:]+)\(\)`", step)


def walk(page: str, name: str) -> Walk:
    section = page[page.index(f"## {name} walk:") :].split("\n## ", 1)[0]
    said = re.search(r"^(\d+) files", section, flags=re.MULTILINE)
    assert said, "a walk begins by saying how many files it has"
    steps = re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, flags=re.MULTILINE)
    return Walk(int(said[1]), tuple(" ".join(step.split()) for step in steps))


def defined_in(file: Path) -> set[str]:
    """Functions, and methods with their class; in C++ the qualified names that are followed by parameters."""
    if file.suffix == ".cpp":
        return set(re.findall(r"\b(\w+::\w+)\(", file.read_text()))
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{method.name}" for method in methods)
    return found


@pytest.mark.parametrize(("name", "most"), [("First", 16), ("Second", 12)])
def test_a_walk_has_as_many_files_as_it_says_and_not_too_many(name: str, most: int) -> None:
    told = walk((REPO / "ARCHITECTURE.md").read_text(), name)
    assert told.said == len(told.files) <= most


@pytest.mark.parametrize("name", ["First", "Second"])
def test_what_a_walk_names_is_there(name: str) -> None:
    """Each function in a file that its walk has named by then, and each file with a function in its step."""
    passed: set[str] = set()
    for step in walk((REPO / "ARCHITECTURE.md").read_text(), name).steps:
        files, functions = files_in(step), functions_in(step)
        passed.update(files)
        there = {file: defined_in(REPO / file) for file in passed}
        assert functions, step
        for function in functions:
            assert any(function in names for names in there.values()), f"{function} is in no file so far"
        for file in files:
            assert there[file] & set(functions), f"{file} has none of the functions that its step names"


def test_the_page_of_the_connector_has_its_settings_with_their_defaults() -> None:
    text = (REPO / "docs" / "vllm.md").read_text()
    section = text[text.index("## Settings\n") : text.index("## Settings of a single request")]
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", section, flags=re.MULTILINE)
    said = {name: default.strip("`") for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    fields = {field.name: field.default for field in dataclasses.fields(ConnectorConfig)}
    assert set(said) == set(fields)
    found_out = {"socket", "tenant", "salt", "salt_file", "weights_revision", "prefill_tokens_per_s"}
    for name in set(fields) - found_out:
        default = fields[name]
        shown = {True: "true", False: "false"}[default] if isinstance(default, bool) else default
        if isinstance(shown, tuple):
            shown = f"[{', '.join(f'{chr(34)}{each}{chr(34)}' for each in shown)}]"
        elif isinstance(shown, float):
            shown = f"{shown:g}"
        assert said[name] == str(shown), name


def test_drawings_are_well_formed_and_have_a_title() -> None:
    for drawing in (REPO / "docs" / "figures").glob("*.svg"):
        root = ElementTree.parse(drawing).getroot()
        named = root.find("{http://www.w3.org/2000/svg}title") is not None
        assert named or drawing.stem in DRAWINGS, drawing.name


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_plot_is_of_the_numbers_in_its_file(name: str) -> None:
    data = (FIGURES / f"{name}.json").read_bytes()
    assert digest(data) in (FIGURES / f"{name}.svg").read_text(), "make figures"


def test_the_plots_numbers_are_those_on_the_page_of_evidence() -> None:
    page = (REPO / "docs" / "evidence.md").read_text()
    for trace in json.loads((FIGURES / "first_token.json").read_text())["traces"]:
        hits = trace["hit_percent"]
        cells = [f" {value} ms ({hits[name]} %) " for name, value in trace["mean_ms"].items()]
        row = "|".join(cells)
        assert row in page, trace["name"]
