"""What is said of a store's driver before a daemon starts. The driver is imported in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvtierd.config.daemon import Config, Loaded
from kvtierd.config.store import StoreConfig
from kvtierd.preflight import store
from kvtierd.preflight.findings import Finding, Situation, Verdict

from tests.support.drivers import write_driver


def findings(url: str, *options: tuple[str, str], compression: str = "off") -> list[Finding]:
    config = Config(store=StoreConfig(url=url, options=options, compression=compression))
    return list(store.check_store(Situation(Loaded(config, {}, None), None, True)))


def finding(url: str, *options: tuple[str, str]) -> Finding:
    [found] = findings(url, *options)
    return found


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a package may be installed."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_without_a_store_nothing_is_said() -> None:
    assert list(store.check_store(Situation(Loaded(Config(), {}, None), None, True))) == []


def test_a_store_is_told_with_the_package_of_its_driver(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    found = finding(shared.as_uri())
    assert found.verdict is Verdict.OK
    assert f"{shared.as_uri()}, by kvtier " in found.found
    assert not shared.exists(), "looking makes nothing"


def test_secrets_in_the_configuration_are_warned_of() -> None:
    found = finding("s3://bucket", ("region", "eu"), ("secret_access_key", "x"))
    assert (found.verdict, found.field, found.value) == (
        Verdict.WARNING,
        "store.options",
        "secret_access_key",
    )


def test_a_driver_is_imported_elsewhere_and_may_print(driver: Path) -> None:
    write_driver(
        driver, "loud_driver", "loud", "print('{\"error\": 7}')\n" + "open_store = print\nprint('x' * 70_000)"
    )
    found = finding("loud://x")
    assert (found.verdict, found.found) == (Verdict.OK, "loud://x, by loud_driver-package 1.0")
    assert "loud_driver" not in sys.modules


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_library_that_nobody_has", "No module named 'a_library_that_nobody_has'"),
        ("import os\nos._exit(3)", "its check ended with 3"),
        ("import os\nos._exit(0)", "its check ended without a result"),
        ("raise SystemExit('no')", "SystemExit: no"),
    ],
)
def test_one_that_cannot_be_imported_is_a_failure(driver: Path, source: str, said: str) -> None:
    write_driver(driver, "bad_driver", "bad", source)
    found = finding("bad://x")
    assert (found.verdict, found.field, found.value) == (Verdict.FAILURE, "store.url", "bad://x")
    assert said in found.found


def test_one_whose_import_hangs_is_waited_for_no_longer_than_a_while(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_driver(driver, "slow_driver", "slow", "import time\ntime.sleep(3600)")
    monkeypatch.setattr(store, "IMPORT_S", 0.5)
    found = finding("slow://x")
    assert (found.verdict, "could not be imported within" in found.found) == (Verdict.WARNING, True)


def test_who_is_to_compress_needs_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.verdict for each in findings(tmp_path.as_uri(), compression="zstd")] == [Verdict.OK]
    monkeypatch.setitem(sys.modules, "zstandard", None)
    found, _ = findings(tmp_path.as_uri(), compression="zstd")
    assert (found.verdict, found.field, found.value) == (Verdict.FAILURE, "store.compression", "zstd")
    assert found.found == "blocks cannot be compressed without zstandard"
    assert "pip install 'zstandard>=" in found.remedy
    found, _ = findings(tmp_path.as_uri())
    assert (found.verdict, found.field) == (Verdict.WARNING, "store.compression")
    assert found.found == "without zstandard, blocks that other hosts have compressed are misses"
