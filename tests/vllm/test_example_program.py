"""examples/vllm_on_cpu.py: two engines, and the second one loads what the first one computed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[2] / "examples" / "vllm_on_cpu.py"


@pytest.fixture
def host(socket_dir: Path, shm_dir: Path) -> Iterator[DaemonHost]:
    """A daemon of the program's own: it waits until all stores have ended."""
    host = DaemonHost(socket_dir, shm_dir / "pool", pool__size="66MiB")
    host.start()
    yield host
    host.stop()


def test_the_second_engine_loads_what_the_first_one_computed(host: DaemonHost) -> None:
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"KVTIER_SOCKET": str(host.socket)},
    )
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stdout.splitlines() if line.startswith(("first", "second", "both"))]
    assert said == [
        "first engine: 0 of 1000 prompt tokens came from the cache",
        "second engine: 992 of 1000 prompt tokens came from the cache",
        "both engines gave the same answer: True",
    ]
