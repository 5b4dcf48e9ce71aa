"""A daemon with disks, and a client that fills and reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.plain_client import BLOCKS, PlainClient, block_hashes
from tests.support.process import Daemon, until

POOL = {"pool__size": "6MiB", "pool__extent_size": "1MiB"}
"""Room for about 250 blocks."""


def batch(name: str, number: int) -> list[bytes]:
    return block_hashes(name, range(number * BLOCKS, (number + 1) * BLOCKS))


class Tier:
    """Directories for disks, and what is to go wrong with them."""

    def __init__(self, root: Path) -> None:
        self.paths = [root / "a", root / "b"]
        for path in self.paths:
            path.mkdir(parents=True)
        self._control = root / "faults.json"

    def settings(self, count: int = 1, **changed: object) -> dict[str, Any]:
        """For a daemon with so many of them."""
        paths = ":".join(map(str, self.paths[:count]))
        tier = {"disk__paths": paths, "disk__size": "34MiB", "disk__extent_size": "1MiB"}
        return POOL | tier | {f"disk__{name}": value for name, value in changed.items()}

    def fail(self, **faults: object) -> None:
        """From now on this goes wrong, as kvtierd.workers.disk.faults says it; nothing: nothing more."""
        fresh = self._control.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.rename(self._control)

    @property
    def slab(self) -> Path:
        return self.paths[0] / "kvtier.slab"


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    root = tmp_path / "disks"
    monkeypatch.setenv("KVTIER_DISK_FAULTS", str(root / "faults.json"))
    yield Tier(root)
    shutil.rmtree(root)


def settled(daemon: Daemon) -> None:
    """Returns when nothing is on its way to or from a disk."""
    until(
        lambda: not any(each.writing_bytes or each.reading_bytes for each in daemon.status().disks),
        "nothing on its way",
    )


def written(daemon: Daemon, count: int) -> None:
    """Returns when the disks have taken so many blocks, and nothing more is on its way."""
    until(lambda: sum(each.written_blocks for each in daemon.status().disks) >= count, f"{count} written")
    settled(daemon)


def load_all(plain: PlainClient, hashes: Sequence[bytes]) -> None:
    """Returns when all of them have been loaded, after as many promotions as that takes; every byte is
    compared."""
    until(lambda: plain.load(hashes) == len(hashes), f"{len(hashes)} blocks loaded")


@pytest.fixture
def connect(socket_dir: Path) -> Iterator[Callable[..., PlainClient]]:
    """Clients that are closed at the end of the test."""
    clients: list[PlainClient] = []

    def connect_one(instance: str = "engine") -> PlainClient:
        clients.append(PlainClient(socket_dir / "kvtierd.sock", instance))
        return clients[-1].ready()

    yield connect_one
    for client in clients:
        client.close()


Connect = Callable[..., PlainClient]
