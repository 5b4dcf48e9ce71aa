"""A disk's worker that is killed, stopped or hangs under a client that goes on, or killed after any step that
it persists, its daemon with it or not; and disks that fail, are slow, or have no room. The host serves on,
whatever comes back is right, and a disk that works again is used again."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from kvtier import Transfer

from tests.faults.campaigns.place import side_by_side
from tests.faults.campaigns.tier import (
    BATCH,
    Owner,
    Tier,
    disk_workers,
    on_disks,
    owner_engine,
    signal_if_there,
    until,
    wait_live,
)
from tests.support.length import LONG, rounds
from tests.support.process import DEADLINE_S, Daemon

ROUNDS = rounds(3, 40)
CHAPTERS = rounds(3, 6)
OF_ONE_DAEMON = rounds(1, 7)
"""Rounds of each. Who does not last is replaced ever later."""
WAYS = ("killed", "stopped", "hangs")
STEPS = range(1, 60) if LONG else (random.randrange(2, 16),)
"""Which persisted steps of a worker's life are its last. All of them are enumerated at full length, and in
tests/integration/disk, where nothing but the worker is started for it."""
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
IO_DEADLINE_S = 3.0
"""Not less: a worker, or a disk, that is slow for a second or two is not to be given up for it."""
KNOWN = 16
"""Batches that are on the disks: more than the pool holds."""
TMPFS_MIB = 40

pytestmark = [pytest.mark.faults, pytest.mark.timeout(ROUNDS * 40 + 300)]


def keep_busy(owner: Owner, daemon: Daemon, chance: random.Random) -> list[Transfer]:
    """Stores under way, and promotions."""
    client, transfers = owner.engine.client, []
    for first in (0, BATCH):
        hashes = owner.next_batch()
        ids = list(range(first, first + BATCH))
        owner.engine.fill(ids, hashes)
        transfers.append(client.store(hashes, ids))
        owner.others.append(hashes)
    for hashes in chance.sample(owner.settled, 4):
        client.lookup(hashes, timeout_s=DEADLINE_S)
    return transfers


def served_on(owner: Owner, transfers: list[Transfer], chance: random.Random) -> None:
    """The host's own stores and loads are done as ever; a disk that is not there is a miss."""
    for transfer in transfers:
        assert transfer.wait(DEADLINE_S).done, "a store to the host failed for want of a disk"
    for hashes in [*chance.sample(owner.settled, 2), *owner.others[-2:]]:
        owner.load(hashes, complete=False)


def chapter(chapter_number: int, count: Counter[str]) -> None:
    """One daemon's share of the rounds."""
    chance = random.Random(SEED + chapter_number)
    with Tier(disks=2, deadline_s=IO_DEADLINE_S, slow_deadline_s=IO_DEADLINE_S, errors_max=1000) as tier:
        daemon = tier.start_tier()
        with owner_engine(daemon.socket) as engine:
            engine.wait_ready()
            owner = Owner(engine, count)
            for _ in range(KNOWN):
                owner.settle(daemon)
            until(lambda: len(disk_workers(daemon)) == 2, "both live")
            opened = open_files(daemon.pid)
            for number in range(OF_ONE_DAEMON):
                one_round(tier, daemon, owner, WAYS[(chapter_number + number) % len(WAYS)], chance)
            for hashes in owner.settled:
                owner.load(hashes, complete=True)
            for hashes in owner.others:
                owner.load(hashes, complete=False)
            until(lambda: open_files(daemon.pid) <= opened, "no descriptor is left of them")
            assert daemon.status().counters.integrity_failures == 0
            until(lambda: len(disk_workers(daemon)) == 2, "both live")
        assert daemon.stop() == 0


def one_round(tier: Tier, daemon: Daemon, owner: Owner, way: str, chance: random.Random) -> None:
    """Something happens to the worker of one disk, or to both disks, while they are busy."""
    count = owner.count
    victim = chance.choice(disk_workers(daemon))
    transfers = keep_busy(owner, daemon, chance)
    time.sleep(chance.random() * 0.03)
    if way == "hangs":
        tier.fail(hang=True)
        count["disk_worker_hangs"] += 1
    else:
        number = signal.SIGKILL if way == "killed" else signal.SIGSTOP
        name = "disk_worker_kills" if way == "killed" else "disk_worker_stops"
        count[name] += signal_if_there(victim, number)
    served_on(owner, transfers, chance)
    if way == "hangs":
        # One that has nothing to do hangs no more than one that waits to be asked.
        time.sleep(IO_DEADLINE_S * 1.5)
        tier.fail()
    else:
        until(partial(gone, victim), "it is gone")
    wait_live(daemon)
    for hashes in chance.sample(owner.settled, 2):
        owner.load(hashes, complete=True)


def test_a_worker_that_is_killed_stopped_or_hangs_costs_misses_only(
    proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {CHAPTERS} chapters of {OF_ONE_DAEMON} rounds")
    side_by_side([partial(chapter, number) for number in range(CHAPTERS)], count)
    proved(
        f"{CHAPTERS * OF_ONE_DAEMON} times a disk's worker was killed, stopped or hung: the host served on,"
        f" no block on a disk was lost, {count['blocks_compared']} compared,"
        f" {count['wrong_bytes']} wrong bytes (KVTIER_SEED={SEED})"
    )


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_daemon_and_a_worker_killed_after_any_persisted_step_lose_nothing_that_was_there(
    proved: Callable[[str], None], count: Counter[str]
) -> None:
    """The worker kills itself right after its nth step; its daemon is killed with it, or goes on without."""
    chance = random.Random(SEED)
    last = 0
    for step in STEPS:
        with ExitStack() as stack:
            tier = stack.enter_context(Tier(size="10MiB"))
            if not story(tier, step, chance.random() < 0.5, count):
                break
            last = step
            count["disk_crash_points"] += 1
    if LONG:
        assert last < max(STEPS), "there may be more steps"
    proved(
        f"a disk's worker killed right after {count['disk_crash_points']} of its persisted steps, its daemon"
        f" too or not: {count['blocks_compared']} blocks compared, {count['wrong_bytes']} wrong bytes"
    )


def story(tier: Tier, step: int, with_daemon: bool, count: Counter[str]) -> bool:
    """A new slab is made, and two batches are written. False if the worker has outlived that."""
    daemon = tier.start_tier(disk__start_deadline_s=0.05)
    wait_live(daemon)
    with owner_engine(daemon.socket) as engine:
        engine.wait_ready()
        owner = Owner(engine, count)
        owner.settle(daemon)
        daemon.kill()
        tier.fail(crash_after=step)
        daemon = tier.start_tier(disk__start_deadline_s=0.05)
        engine.wait_ready()
        for _ in range(2):
            hashes = owner.next_batch()
            engine.fill(list(range(BATCH)), hashes)
            assert engine.store(hashes, range(BATCH)).wait(DEADLINE_S).done, "the host serves on"
            owner.others.append(hashes)
        until(lambda: crashed(daemon) or on_disks(daemon) >= 3 * BATCH, "it has crashed, or done it all")
        was_killed = crashed(daemon)
        if with_daemon:
            daemon.kill()
        tier.fail()
        if with_daemon:
            daemon = tier.start_tier()
            engine.wait_ready()
        wait_live(daemon)
        for hashes in owner.settled:
            owner.load(hashes, complete=True)
        for hashes in owner.others:
            owner.load(hashes, complete=True)  # the host has them
        daemon.kill()
        tier.lose_pool()
        daemon = tier.start_tier()
        wait_live(daemon)
        engine.wait_ready()
        for hashes in owner.settled:
            owner.load(hashes, complete=True)
        for hashes in owner.others:
            owner.load(hashes, complete=False)
        status = daemon.status()
        assert status.disks[0].cold_reason == ""
        assert status.disks[0].corrupt_blocks == 0, "a torn write was believed"
    assert daemon.stop() == 0
    return was_killed


def crashed(daemon: Daemon) -> bool:
    return any("killed by SIGKILL" in disk.why for disk in daemon.status().disks)


def test_disks_that_fail_and_are_slow_at_random_cost_misses_only(
    proved: Callable[[str], None], count: Counter[str]
) -> None:
    chance = random.Random(SEED)
    with Tier(disks=2) as tier:
        daemon = tier.start_tier()
        with owner_engine(daemon.socket) as engine:
            engine.wait_ready()
            owner = Owner(engine, count)
            for _ in range(KNOWN // 2):
                owner.settle(daemon)
            rounds = errors = 0
            # Chance decides whether a disk is used while it fails: a few rounds may see no error.
            while rounds < ROUNDS or (errors == 0 and rounds < ROUNDS + 20):
                rounds += 1
                tier.fail(**some_faults(chance))
                count["disk_faults_injected"] += 1
                transfers = keep_busy(owner, daemon, chance)
                served_on(owner, transfers, chance)
                if chance.random() < 0.3:
                    tier.fail()
                    wait_live(daemon)
                errors = sum(disk.errors for disk in daemon.status().disks)
            assert errors, "nothing has failed"
            tier.fail()
            wait_live(daemon)
            found = sum(owner.load(hashes, complete=False) for hashes in [*owner.settled, *owner.others])
            owner.settle(daemon)
            owner.load(owner.settled[-1], complete=True)
            assert daemon.status().counters.integrity_failures == 0
        assert daemon.stop() == 0
    proved(
        f"{count['disk_faults_injected']} times disks failed or were slow ({errors} errors): the host served"
        f" on, {found} blocks were read from them afterwards, {count['wrong_bytes']} wrong bytes"
        f" (KVTIER_SEED={SEED})"
    )


def some_faults(chance: random.Random) -> dict[str, object]:
    """What goes wrong with one disk after another for a while."""
    faults: dict[str, object] = {}
    for kind in ("read", "write", "records"):
        if chance.random() < 0.5:
            code = chance.choice(("EIO", "ENOSPC") if kind != "read" else ("EIO",))
            faults[kind] = {"errno": code, "every": chance.choice((1, 2, 3))}
    if chance.random() < 0.4:
        faults["delay_s"] = chance.choice((0.01, 0.2))
    return faults


def in_small_tmpfs(folder: Path) -> list[str]:
    """Words before a command: it runs with a tmpfs of TMPFS_MIB of its own at `folder`, which ends with it.
    Fails if this machine does not let us mount one."""
    unshare = shutil.which("unshare")
    assert unshare, "unshare (util-linux) is needed to mount a small file system"
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={TMPFS_MIB}m,mode=0700 kvtier-test "$0" && exec "$@"'
    return [unshare, "--mount", *root, "sh", "-c", mount, str(folder)]


def fill(path: Path) -> None:
    """Writes until the file system is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(64 << 10)):
                pass
        except OSError:
            pass


class TestNoRoom:
    def test_a_disk_with_no_room_for_its_slab_is_refused_with_what_to_do(self, count: Counter[str]) -> None:
        with Tier(size="66MiB", start_deadline_s=5) as tier:
            with pytest.raises(AssertionError, match="did not start") as refused:
                tier.start_tier(wrap=in_small_tmpfs(tier.paths[0]))
            for part in ("disk.size", "66MiB", f"of {TMPFS_MIB} MiB are free", "lower disk.size"):
                assert part in str(refused.value)
            count["disks_without_room"] += 1

    def test_a_disk_that_runs_out_of_room_is_used_again_when_there_is_some(self, count: Counter[str]) -> None:
        """Its slab has lost its room, as where none can be preallocated."""
        with Tier(size="34MiB", errors_max=2) as tier:
            daemon = tier.start_tier(wrap=in_small_tmpfs(tier.paths[0]))
            wait_live(daemon)
            seen = Path(f"/proc/{daemon.pid}/root", *tier.paths[0].parts[1:])
            with owner_engine(daemon.socket) as engine:
                engine.wait_ready()
                owner = Owner(engine, count)
                owner.settle(daemon)
                hole = ["--punch-hole", "--offset", str(4 << 20), "--length", str(30 << 20)]
                subprocess.run(["fallocate", *hole, str(seen / "kvtier.slab")], check=True)
                fill(seen / "somebody")
                deadline_s = time.monotonic() + DEADLINE_S
                while daemon.status().disks[0].state != "failing":
                    for transfer in keep_some(owner):
                        assert transfer.wait(DEADLINE_S).done, "the host serves on"
                    assert time.monotonic() < deadline_s, "the disk has room for ever"
                assert "ENOSPC" in daemon.status().disks[0].why
                count["disks_without_room"] += 1
                for hashes in [*owner.settled, *owner.others]:
                    owner.load(hashes, complete=False)
                (seen / "somebody").unlink()
                wait_live(daemon)
                owner.settle(daemon)
                for hashes in [*owner.settled[-1:], *owner.others]:
                    owner.load(hashes, complete=hashes in owner.settled)
            assert daemon.status().counters.integrity_failures == 0
            assert daemon.stop() == 0


def keep_some(owner: Owner) -> list[Transfer]:
    hashes = owner.next_batch()
    owner.engine.fill(list(range(BATCH)), hashes)
    owner.others.append(hashes)
    return [owner.engine.client.store(hashes, range(BATCH))]
