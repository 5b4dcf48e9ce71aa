"""Fixtures for every test, and the rules about which tests may be skipped."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import sharing
from tests.support.fake_cuda import fake_cuda as fake_cuda
from tests.support.fake_cuda import make_fake_cuda as make_fake_cuda
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX, LeakCheck
from tests.support.logs import kept_logs

# Set by `make test`: there a missing engine is a failure, because a skipped proof is no proof.
REQUIRE_VLLM = os.environ.get("KVTIER_REQUIRE_VLLM") == "1"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> sharing.Sharing:
    """Shares the tests among several processes, if there are several."""
    config.option.loadscopereorder = False  # the order is that of `sharing.rank`
    return sharing.Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, and says why."""
    no_vllm = importlib.util.find_spec("vllm") is None and not REQUIRE_VLLM
    no_gpu = not Path("/dev/nvidiactl").exists()
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: sharing.rank(item.nodeid))
    for item in items:
        if no_vllm and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; run `make setup`"))
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows what daemons and engines have logged if a test has failed: their folders are gone afterwards."""
    report = yield
    if report.failed and report.when != "teardown":
        report.sections += kept_logs().items()
    return report


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_by_the_session() -> Iterator[None]:
    """What wider fixtures made must be gone when the last test has ended."""
    check = LeakCheck()
    yield
    check.verify()


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[LeakCheck]:
    """Every test leaves /dev/shm and the process table as it found them; `verify()` may be called early."""
    check = LeakCheck()
    yield check
    check.verify()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private folder whose path is short enough for a Unix socket (108 bytes in all), unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def disk_dir() -> Iterator[Path]:
    """A private folder on a file system that is one, not memory, which `tmp_path` may be on."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-disk-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A private folder in /dev/shm for pool files, named so that two test runs on one machine do not disturb
    each other."""
    folder = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def proved(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`proved("200 kills, no byte wrong")` adds the sentence to the summary of `make test`."""
    return lambda sentence: record_property("proved", sentence)


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """`count["daemon_kills"] += 1` as it happens. `make test-faults` adds up what all campaigns have counted,
    those that failed included, and wants its share of each (tools/fault_counts.py)."""
    counts: Counter[str] = Counter()
    yield counts
    for name, number in counts.items():
        record_property(f"count.{name}", number)
