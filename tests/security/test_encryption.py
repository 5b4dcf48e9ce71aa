"""Disks that are encrypted, behind a real daemon: what somebody who has the disk learns, and what becomes of
it when slab, records or keys are exchanged."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from kvtier.v1 import admin_pb2, types_pb2

from tests.integration.daemon.raw import RawSession, hashes
from tests.security.conftest import As, Start
from tests.security.people import ATTACKER, VICTIM, kvtierctl
from tests.support.process import DEADLINE_S, Daemon, until

BLOCKS = 16
IDS = list(range(BLOCKS))
PAGE = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    make_key(folder, "default")
    return folder


def make_key(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(secrets.token_hex(32))
    (folder / name).chmod(0o400)


def settings(folder: Path, keys: Path | None) -> dict[str, object]:
    disk = {"disk__paths": folder, "disk__size": "34MiB", "disk__extent_size": "1MiB"}
    encrypted = {} if keys is None else {"disk__encryption_keys": keys}
    return disk | encrypted | {"disk__write_mode": "through", "pool__size": "6MiB"}


def disk(daemon: Daemon) -> admin_pb2.DiskStatus:
    return daemon.status().disks[0]


def store(daemon: Daemon, session: RawSession, keys: bytes, seed: int) -> list[bytes]:
    """Stores blocks, and returns their bytes when the disk has them."""
    before = disk(daemon).written_blocks
    session.fill(seed)
    assert session.store(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    until(lambda: disk(daemon).written_blocks >= before + BLOCKS, "written")
    return [session.block(number) for number in IDS]


def restart(daemon: Daemon, start: Start, **changed: object) -> Daemon:
    """Another daemon on the same disk, with a new pool."""
    assert daemon.stop() == 0
    daemon.pool.unlink()
    return start(**changed)


def hits(session: RawSession, keys: bytes) -> int:
    """How many are found, once nothing is on its way any more."""
    found: list[int] = []

    def settled() -> bool:
        answer = session.lookup(keys).answers[0]
        found[:] = [answer.hits]
        return types_pb2.BLOCK_STATE_PENDING not in answer.states

    until(settled, "nothing is pending")
    return found[0]


def loaded(session: RawSession, keys: bytes) -> list[bytes]:
    """The bytes, when all of it is on the host."""
    until(lambda: hits(session, keys) == BLOCKS, "brought up")
    session.fill(99)
    assert session.load(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    return [session.block(number) for number in IDS]


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_blocks_come_back_and_the_slab_tells_nothing_if_it_is_encrypted(
    start: Start, connect: As, folder: Path, keys: Path, is_encrypted: bool
) -> None:
    options = settings(folder, keys if is_encrypted else None)
    daemon = start(**options)
    assert (", encrypted" in daemon.greeting) == is_encrypted
    right = store(daemon, connect(VICTIM).ready(), hashes(BLOCKS), 1)
    said = kvtierctl(0, daemon.socket, "status").stdout
    assert ("AES-256-GCM" in said) == is_encrypted
    assert disk(daemon).encrypted == is_encrypted
    daemon = restart(daemon, start, **options)
    assert disk(daemon).recovered_blocks == BLOCKS
    found = (folder / "kvtier.slab").read_bytes()
    for block in right:
        pieces = (block[:32], block[len(block) // 2 :][:32], block[-32:])
        assert [piece in found for piece in pieces] == [not is_encrypted] * 3
    assert loaded(connect(VICTIM).ready(), hashes(BLOCKS)) == right
    assert disk(daemon).corrupt_blocks == 0
    secret = (keys / "default").read_text()
    assert secret not in daemon.log()
    for pid in (daemon.pid, *(worker.pid for worker in daemon.status().workers)):
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def slots_of(slab: bytes) -> list[tuple[int, int, int]]:
    """Of each READY record of a slab with extents of 1 MiB: its offset, that of its data, and their bytes."""
    found = []
    for extent in range(2 << 20, len(slab), 1 << 20):
        if slab[extent : extent + 8] != b"KVTIERX1":
            continue
        stride, count, data = (int.from_bytes(slab[extent + at :][:8], "little") for at in (24, 32, 40))
        for row in range(count):
            record = extent + PAGE + row * 128
            if slab[record] == 2:
                length = int.from_bytes(slab[record + 72 :][:4], "little")
                found.append((record, extent + data + row * stride, length))
    return found


@pytest.mark.parametrize("with_records", [False, True])
def test_slots_that_were_exchanged_are_never_served(
    start: Start, connect: As, folder: Path, keys: Path, with_records: bool
) -> None:
    """With their records, these are as they were, checksums included, and only lie in another place."""
    options = settings(folder, keys)
    daemon = start(**options)
    right = store(daemon, connect(VICTIM).ready(), hashes(BLOCKS), 1)
    assert daemon.stop() == 0
    slab = bytearray((folder / "kvtier.slab").read_bytes())
    (one, one_data, size), (other, other_data, _), *rest = slots_of(bytes(slab))
    assert len(rest) == BLOCKS - 2
    slab[one_data : one_data + size], slab[other_data : other_data + size] = (
        slab[other_data : other_data + size],
        slab[one_data : one_data + size],
    )
    if with_records:
        slab[one : one + 128], slab[other : other + 128] = slab[other : other + 128], slab[one : one + 128]
    (folder / "kvtier.slab").write_bytes(slab)
    daemon.pool.unlink()
    daemon = start(**options)
    daemon.may_complain = True
    session = connect(VICTIM).ready()
    lost = [slab[record + 40 : record + 72] for record in (one, other)]
    keys_of = [hashes(BLOCKS)[at * 32 : at * 32 + 32] for at in IDS]
    for at, key in enumerate(keys_of):
        found = hits(session, key)
        assert found == (key not in lost), "the two are misses, and the others are there"
        if found:
            session.fill(77)
            assert session.load(key, [at]).state == types_pb2.TRANSFER_STATE_DONE
            assert session.block(at) == right[at]
    assert disk(daemon).corrupt_blocks == 2
    assert daemon.metrics()["kvtier_integrity_failures_total.read.disk"] == 2


@pytest.mark.parametrize("before", [True, False])
def test_a_slab_of_the_other_kind_is_cold(
    start: Start, connect: As, folder: Path, keys: Path, before: bool
) -> None:
    daemon = start(**settings(folder, keys if before else None))
    store(daemon, connect(VICTIM).ready(), hashes(BLOCKS), 1)
    after = settings(folder, None if before else keys)
    daemon = restart(daemon, start, **after)
    assert "and is to be" in disk(daemon).cold_reason
    session = connect(VICTIM).ready()
    assert hits(session, hashes(BLOCKS)) == 0
    right = store(daemon, session, hashes(BLOCKS), 2)
    restart(daemon, start, **after)
    assert loaded(connect(VICTIM).ready(), hashes(BLOCKS)) == right


def test_with_another_key_it_is_cold(start: Start, connect: As, folder: Path, keys: Path) -> None:
    daemon = start(**settings(folder, keys))
    store(daemon, connect(VICTIM).ready(), hashes(BLOCKS), 1)
    make_key(keys, "default")
    daemon = restart(daemon, start, **settings(folder, keys))
    assert "none of the keys" in disk(daemon).cold_reason
    assert hits(connect(VICTIM).ready(), hashes(BLOCKS)) == 0


def test_a_tenant_whose_key_is_deleted_is_forgotten_and_the_other_is_not(
    start: Start, connect: As, folder: Path, keys: Path
) -> None:
    make_key(keys, f"uid:{VICTIM}")
    daemon = start(**settings(folder, keys))
    store(daemon, connect(VICTIM).ready(), hashes(BLOCKS), 1)
    kept = store(daemon, connect(ATTACKER).ready(), hashes(BLOCKS), 2)
    (keys / f"uid:{VICTIM}").unlink()
    daemon = restart(daemon, start, **settings(folder, keys))
    assert (disk(daemon).recovered_blocks, disk(daemon).cold_reason) == (BLOCKS, "")
    daemon.may_complain = True  # it says that blocks were given up
    assert hits(connect(VICTIM).ready(), hashes(BLOCKS)) == 0
    assert loaded(connect(ATTACKER).ready(), hashes(BLOCKS)) == kept
    assert disk(daemon).corrupt_blocks == 0


def test_a_tenant_without_a_key_is_never_written_and_is_told_once(
    start: Start, connect: As, folder: Path, keys: Path
) -> None:
    make_key(keys, f"uid:{ATTACKER}")
    (keys / "default").unlink()
    daemon = start(**settings(folder, keys))
    daemon.may_complain = True
    sessions = [connect(VICTIM).ready(instance=name) for name in ("one", "two")]
    sessions[0].fill(1)
    assert sessions[0].store(hashes(BLOCKS), IDS).state == types_pb2.TRANSFER_STATE_DONE
    store(daemon, connect(ATTACKER).ready(), hashes(BLOCKS), 2)
    assert disk(daemon).written_blocks == BLOCKS, "only the other's"
    said = [line for line in daemon.log().splitlines() if "there is no key for it" in line]
    assert len(said) == 1
    assert f"uid:{VICTIM}" in said[0]
    assert hits(sessions[0], hashes(BLOCKS)) == BLOCKS, "it is on the host"
    found = (folder / "kvtier.slab").read_bytes()
    assert sessions[0].block(0)[:32] not in found


def refused(folder: Path, socket_dir: Path, pool: Path, keys: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvtierd.cli", "serve", f"--disk-paths={folder}", "--disk-size=34MiB"]
    command += [f"--server-socket={socket_dir}/run/k.sock", f"--pool-path={pool}", "--pool-size=6MiB"]
    command += ["--metrics-listen=off", f"--disk-encryption-keys={keys}"]
    done = subprocess.run(
        command,
        env=os.environ | {"KVTIER_CONFIG": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_keys_that_others_may_read_are_refused_at_start(
    folder: Path, socket_dir: Path, shm_dir: Path, keys: Path
) -> None:
    (keys / "default").chmod(0o640)
    status, said = refused(folder, socket_dir, shm_dir / "pool", keys)
    assert status == 78
    assert f"disk.encryption_keys = '{keys}'" in said
    assert "has mode 0640" in said
    assert f"chmod 400 {keys / 'default'}" in said
    (keys / "default").chmod(0o400)
    keys.chmod(0o755)
    assert f"chmod 700 {keys}" in refused(folder, socket_dir, shm_dir / "pool", keys)[1]
    assert list(folder.iterdir()) == []
