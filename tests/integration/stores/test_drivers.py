"""Stores by drivers of other packages: the example is a store like any other, and one that is broken in
whatever way costs misses, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvtier import MISS

from tests.integration.stores.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.drivers import EXAMPLE, declare_example, write_driver
from tests.support.hosts import NewHost, below, wait_until_put
from tests.support.plain_client import PlainClient, block_hashes
from tests.support.process import DEADLINE_S

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
HASHES = block_hashes("shared", range(24))
OTHERS = block_hashes("others", range(3))


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example package, installed for daemons that start from now on. Returns a copy of its folder."""
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    declare_example(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_the_example_keeps_the_contract_as_its_author_would_see_it(example: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_contract.py"],
        cwd=example,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "17 passed" in ended.stdout


def test_two_hosts_share_blocks_through_the_example(
    example: Path, new_host: NewHost, connect_to: Connect, tmp_path: Path
) -> None:
    url = f"sqlite://{tmp_path}/blocks.db"
    one, two = (new_host(store__url=url, store__options="threads=2") for _ in range(2))
    writer, reader = connect_to(one), connect_to(two)
    assert reader.lookup(HASHES).hits == 0
    assert writer.store(HASHES).done
    wait_until_put(one, len(HASHES))
    until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
    until(lambda: reader.lookup(HASHES).hits == len(HASHES), "they come up")
    assert reader.load(HASHES) == len(HASHES), "every byte is right"
    assert two.status().counters.promoted_blocks == len(HASHES)
    for host in (one, two):
        assert "kvtier_sqlite" not in loaded_by(host.daemon.pid), "only the worker has it"
        [worker] = [worker for worker in host.status().workers if worker.device == "disk-0"]
        assert "libsqlite3" in loaded_by(worker.pid)


def loaded_by(pid: int) -> str:
    """What a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def test_options_that_the_driver_refuses_are_told(
    example: Path, new_host: NewHost, connect_to: Connect, tmp_path: Path
) -> None:
    host = new_host(store__url=f"sqlite://{tmp_path}/blocks.db", store__options="threads=none")
    host.daemon.may_complain = True
    until(lambda: "threads=NUMBER" in below(host).why, "it says why there is no store")
    is_well_without_it(connect_to(host))


def is_well_without_it(plain: PlainClient) -> None:
    """The host serves what it has, and what it has not is a miss."""
    for first in range(0, len(HASHES), 6):
        assert plain.store(HASHES[first : first + 6]).done
    assert plain.load(HASHES) == len(HASHES)
    until(lambda: list(plain.lookup(OTHERS).states) == [MISS], "others are a miss")


BEGIN = """
import asyncio, os, time
from kvtierd.tiers.store.objects import Listed, Piece, StoreError, StoreTrouble
from kvtierd.tiers.store.obstore_store import ObstoreStore

class Broken(ObstoreStore):
"""
END = """
def open_store(url, options, deadline_s):
    return Broken("file://" + url.partition("://")[2], options, deadline_s)
"""
HANG = "    async def read_ranges(self, name, ranges):\n        "
FAULTS = {
    "wrong bytes": """
    async def read_ranges(self, name, ranges):
        return [bytes(size) for _, size in ranges]
""",
    "other blocks' bytes": """
    async def read_ranges(self, name, ranges):
        return (await super().read_ranges(name, ranges))[::-1]
""",
    "too few bytes": """
    async def read_ranges(self, name, ranges):
        return [each[:-1] for each in await super().read_ranges(name, ranges)]
""",
    "too many bytes": """
    async def read_ranges(self, name, ranges):
        return [bytes(each) + b"!" for each in await super().read_ranges(name, ranges)]
""",
    "bytes that change later": """
    async def read_ranges(self, name, ranges):
        found = [bytearray(each) for each in await super().read_ranges(name, ranges)]
        async def later():
            while True:
                await asyncio.sleep(0)
                for each in found:
                    each[0] ^= 0xFF
        asyncio.create_task(later())
        await asyncio.sleep(0.05)
        return found
""",
    "no bytes at all": "    async def read_ranges(self, name, ranges):\n        return None\n",
    "an error of its own": f"{HANG}raise ZeroDivisionError('its own')\n",
    "a read that hangs": f"{HANG}await asyncio.sleep(600)\n",
    "a read that hangs and is deaf": f"{HANG}while True:\n"
    "            try:\n"
    "                await asyncio.sleep(600)\n"
    "            except asyncio.CancelledError: pass\n",
    "a read that blocks the process": f"{HANG}time.sleep(600)\n",
    "a read that ends the process": f"{HANG}os._exit(3)\n",
    "a read that exits": f"{HANG}raise SystemExit(3)\n",
}


SEEN_BY_THE_GUARD = ("other blocks' bytes", "too few bytes", "no bytes at all", "an error of its own")
"""Its unit tests have these too."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.long] * (each in SEEN_BY_THE_GUARD)) for each in FAULTS],
)
def test_what_a_broken_driver_reads_is_a_miss_or_right(
    fault: str, new_host: NewHost, connect_to: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's blocks are there, and this one's driver breaks its contract when it reads them."""
    shared = tmp_path / "shared"
    one = new_host(store__url=shared.as_uri())
    assert connect_to(one).store(HASHES).done
    wait_until_put(one, len(HASHES))
    write_driver(tmp_path / "broken", "broken_driver", "broken", BEGIN + FAULTS[fault] + END)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    two = new_host(
        store__url=f"broken://{shared}", store__deadline_s="1", disk__deadline_s="3", store__probe_after_s="1"
    )
    two.daemon.may_complain = True
    reader = connect_to(two)
    until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
    assert reader.lookup(HASHES).hits == 0
    until(lambda: seen(two, reader), "the fault shows")
    loaded = reader.load(HASHES[: reader.lookup(HASHES).hits])  # which compares every byte
    assert loaded == 0 or fault == "bytes that change later"
    mine = block_hashes("mine", range(8))
    assert reader.store(mine).done
    assert reader.load(mine) == len(mine)


def seen(host: DaemonHost, plain: PlainClient) -> bool:
    """Whether reads of the store have failed, or brought what is right; asks for them again."""
    hits = plain.lookup(HASHES).hits
    store = below(host)
    return bool(hits or store.errors or store.corrupt_blocks or store.state != "live")


def test_a_driver_that_cannot_be_imported_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    write_driver(tmp_path, "broken_driver", "broken", "import a_library_that_nobody_has")
    told = doctor("broken://x", tmp_path)
    assert told.returncode == 1
    assert "FAILURE store (store.url = broken://x)" in " ".join(told.stdout.split()), told.stdout
    assert "No module named 'a_library_that_nobody_has'" in " ".join(told.stdout.split())
    assert "broken-driver-package" in told.stdout.replace("_", "-")


def test_doctor_names_the_package_that_serves_a_store(tmp_path: Path) -> None:
    declare_example(tmp_path)
    shutil.copytree(EXAMPLE / "kvtier_sqlite", tmp_path / "kvtier_sqlite")
    assert "by kvtier-sqlite 0.1.0" in " ".join(doctor("sqlite:///blocks.db", tmp_path).stdout.split())


def doctor(url: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtierd.ctl", "doctor", f"--store-url={url}", "--metrics-listen=off"],
        env=os.environ | {"PYTHONPATH": str(path), "KVTIER_CONFIG": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
