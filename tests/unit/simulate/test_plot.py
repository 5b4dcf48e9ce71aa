"""The picture and the page of `kvtierctl simulate`, and where it says that more room gains less."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from kvtierd.ctl import simulation_plot
from kvtierd.ctl.simulation_plot import knee

from tests.unit.simulate.conftest import run


@pytest.mark.parametrize(
    ("rates", "at"),
    [
        ([0.1, 0.2, 0.3, 0.4], None),
        ([0.1, 0.3, 0.39, 0.4], 1),
        ([0.0, 0.01, 0.4, 0.41], 2),
        ([0.4, 0.4, 0.4], None),
        ([0.1, 0.4], None),
        ([0.1, 0.11, 0.12, 0.4], None),
    ],
)
def test_the_knee_is_where_more_room_gains_less(rates: list[float], at: int | None) -> None:
    assert knee([(10.0**number, rate) for number, rate in enumerate(rates, 1)]) == at


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_of_each_kind(trace: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    done = run(trace, "--capacity", "10%,30%,100%", "--policy", "lru,fifo,optimum", "--plot", path)
    assert done.exit_code == 0, done.output
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(begins)


def test_the_page_has_the_picture_and_all_figures(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    done = run(trace, "--capacity", "10%,100%", "--policy", "lru", "--prefill-rate", "100", "--html", path)
    assert done.exit_code == 0, done.output
    page = path.read_text()
    picture = re.search(r"<svg.*</svg>", page, re.DOTALL)
    assert picture is not None
    ET.fromstring(picture[0])
    assert page.count("<tr>") == 3
    for cell in re.findall(r"[\d.]+%", done.stdout):
        assert f"<td>{cell}</td>" in page
    assert "http" not in re.sub(r"<svg.*</svg>", "", page, flags=re.DOTALL), "it needs nothing else"


def test_a_file_of_another_kind_is_refused_before_anything_is_simulated(trace: Path) -> None:
    done = run(trace, "--plot", "out.bmp")
    assert done.exit_code == 2
    assert "--plot" in done.stderr
    assert "out.bmp is no .png, .svg, .pdf file" in done.stderr


def test_a_folder_that_is_not_there_is_named(trace: Path, tmp_path: Path) -> None:
    done = run(trace, "--capacity", "10%", "--policy", "lru", "--html", tmp_path / "missing" / "out.html")
    assert done.exit_code == 1
    assert "kvtierctl: cannot write" in done.stderr


def test_without_the_library_it_says_how_to_get_it(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_plot, "can_draw", lambda: False)
    done = run(trace, "--plot", "out.png")
    assert done.exit_code == 2
    assert "need matplotlib: install it" in done.stderr
