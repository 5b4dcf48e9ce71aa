"""Models, daemons and engines of SGLang."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine import SGLANG
from tests.support.daemon import DaemonHost
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tools import tiny_llama

QUICK: dict[str, Any] = {"server__heartbeat_interval_s": "0.2", "workers__copy_deadline_s": "3"}


@pytest.fixture(scope="session", autouse=True)
def _sglang_is_there() -> None:
    if not SGLANG.is_dir() or importlib.util.find_spec("torch") is None:
        pytest.skip("SGLang is not installed: tools/setup.sh sglang")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' Llama."""
    return tiny_llama.ensure(tmp_path_factory.mktemp("model") / "tiny", tiny_llama.PRESETS["tiny"])


@pytest.fixture
def host() -> Iterator[DaemonHost]:
    """A place for daemons, and the first of them."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    place = DaemonHost(run, pool / "pool", **QUICK, pool__size="64MiB")
    place.start()
    yield place
    place.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)
