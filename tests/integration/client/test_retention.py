"""Blocks that are held for a time, dropped after one, kept off the disks, let go first, by a real daemon."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvtier.aio
import pytest
from kvtier import GroupQuery, LookupMode, Namespace, Outcome, Retention

from tests.integration.client.conftest import HEARTBEAT, Connect
from tests.integration.daemon.commands import verdict
from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.plain_client import Cache, PlainClient, block_hashes

Verdicts = list[str]
MANY_S = 600.0
"""More than any test takes."""


@pytest.fixture
def tight(socket_dir: Path, shm_dir: Path) -> Iterator[DaemonHost]:
    """A daemon with room for some 250 blocks."""
    host = DaemonHost(socket_dir, shm_dir / "pool", pool__size="6MiB", **HEARTBEAT)
    host.start()
    yield host
    host.stop()


@pytest.fixture
def tiered() -> Iterator[DaemonHost]:
    """The same with a disk, which gets each block as soon as it is stored."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    (run / "disk").mkdir(mode=0o700)
    settings: dict[str, Any] = {
        "pool__size": "6MiB",
        "disk__paths": run / "disk",
        "disk__size": "34MiB",
        "disk__extent_size": "1MiB",
        "disk__write_mode": "through",
    }
    host = DaemonHost(run, pool / "pool", **settings, **HEARTBEAT)
    host.start()
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


def store(plain: PlainClient, hashes: Sequence[bytes], retention: Retention | None = None) -> Outcome:
    for index, value in enumerate(hashes):
        plain.cache.fill(index, value)
    outcome = plain.client.store(hashes, range(len(hashes)), retention=retention).wait(60)
    assert outcome.done, outcome
    return outcome


def verdicts(host: DaemonHost, hashes: Sequence[bytes]) -> Verdicts:
    """Of each block, without using it."""
    return [verdict(host.daemon, value) for value in hashes]


def churn(plain: PlainClient, over: Callable[[], bool], batch: int = 16) -> None:
    """Stores other blocks until that is so."""
    numbers = itertools.count()

    def stored() -> bool:
        number = next(numbers)
        plain.store(block_hashes("churn", range(batch * number, batch * (number + 1))))
        return over()

    until(stored, "what goes has gone")


def test_what_is_held_outlives_what_is_not(tight: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(tight)
    held, touched, plainly = (block_hashes(name, range(8)) for name in ("held", "touched", "plainly"))
    store(plain, held, Retention(hold_s=MANY_S))
    store(plain, touched)
    store(plain, plainly)
    plain.client.touch(touched, hold_s=MANY_S)
    until(lambda: tight.status().held_blocks == 16, "both are held")
    status = tight.status()
    assert status.held_bytes >= 16 * status.pool.used_bytes // status.blocks.ready
    churn(plain, lambda: set(verdicts(tight, plainly)) == {"EVICTED"})
    churn(plain, lambda: tight.status().counters.evicted_blocks > 400)
    assert plain.load(held) == plain.load(touched) == 8
    assert tight.status().held_blocks == 16
    assert tight.status().counters.unheld_blocks == 0


def test_a_hold_ends(tight: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(tight)
    held = block_hashes("held", range(8))
    store(plain, held, Retention(hold_s=0.5))
    until(lambda: tight.status().held_blocks == 0, "nothing is held any more")
    assert set(verdicts(tight, held)) == {"READABLE"}, "they are as others now"
    churn(plain, lambda: set(verdicts(tight, held)) == {"EVICTED"})


def test_no_more_is_held_than_the_daemon_has_room_for(tight: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(tight)
    for part in range(3):
        store(plain, block_hashes(f"held {part}", range(48)), Retention(hold_s=MANY_S))
    until(lambda: tight.status().counters.unheld_blocks > 0, "some are not held")
    status = tight.status()
    assert 0 < status.held_blocks < 3 * 48
    assert status.held_blocks + status.counters.unheld_blocks == 3 * 48
    assert status.held_bytes <= status.pool.capacity_bytes


def test_blocks_with_a_time_are_dropped_when_it_is_over(tight: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(tight)
    short, long, forever = (block_hashes(name, range(4)) for name in ("short", "long", "forever"))
    began_s = time.monotonic()
    store(plain, short, Retention(ttl_s=2))
    store(plain, long, Retention(ttl_s=MANY_S))
    store(plain, forever)
    loaded = plain.load(short)
    if time.monotonic() - began_s < 2:
        assert loaded == 4, "its time is not over"
    until(lambda: set(verdicts(tight, short)) == {"EXPIRED"}, "its time is over")
    assert time.monotonic() - began_s >= 2
    assert plain.lookup(short).hits == 0
    assert plain.load(long) == plain.load(forever) == 4
    assert tight.status().counters.expired_blocks == 4


def test_the_longer_wish_is_granted(tight: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(tight)
    both, short = block_hashes("both", range(4)), block_hashes("short", range(4))
    store(plain, both, Retention(ttl_s=2))
    store(plain, both)  # it is there, and somebody wants it for longer
    store(plain, short, Retention(ttl_s=2))
    until(lambda: set(verdicts(tight, short)) == {"EXPIRED"}, "the time is over")
    assert plain.load(both) == 4


def test_what_was_cooled_goes_first_and_its_tail_before_its_head(
    tight: DaemonHost, connect_to: Connect
) -> None:
    plain = connect_to(tight)
    older, cooled = block_hashes("older", range(16)), block_hashes("cooled", range(16))
    store(plain, older)
    store(plain, cooled)
    plain.client.cool(cooled)
    seen: list[Verdicts] = []

    def gone() -> bool:
        seen.append(verdicts(tight, cooled))
        return set(seen[-1]) == {"EVICTED"}

    churn(plain, gone, batch=4)
    assert all(sorted(one, reverse=True) == one for one in seen), "READABLE, and then EVICTED"
    assert set(verdicts(tight, older)) == {"READABLE"}


def test_what_is_used_again_is_warm_again(tight: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(tight)
    older, used = block_hashes("older", range(16)), block_hashes("used", range(16))
    store(plain, older)
    store(plain, used)
    plain.client.cool(used)
    assert plain.load(used) == 16
    churn(plain, lambda: "EVICTED" in verdicts(tight, older), batch=4)
    assert set(verdicts(tight, used)) == {"READABLE"}


def test_host_only_blocks_come_to_no_disk_and_host_only_lookups_leave_it_alone(
    tiered: DaemonHost, connect_to: Connect
) -> None:
    plain = connect_to(tiered)
    everywhere, host_only, timed = (
        block_hashes(name, range(8)) for name in ("everywhere", "host only", "timed")
    )
    store(plain, host_only, Retention(host_only=True))
    store(plain, timed, Retention(ttl_s=MANY_S))
    store(plain, everywhere)
    until(lambda: tiered.status().disks[0].written_blocks >= 8, "the disk has what it is to have")
    churn(plain, lambda: set(verdicts(tiered, host_only + timed)) == {"EVICTED"})
    churn(plain, lambda: set(verdicts(tiered, everywhere)) == {"ON_DISK"})
    promoted = tiered.status().counters.promoted_blocks
    client = plain.client
    for answer in (
        client.lookup(everywhere, host_only=True, lease=True, timeout_s=60),
        client.lookup(everywhere, host_only=True, mode=LookupMode.EXACT, timeout_s=60),
        client.lookup(everywhere, [GroupQuery(0)], host_only=True, timeout_s=60),
    ):
        assert (answer.answered, answer.hits, answer.pending) == (True, 0, False)
    assert set(verdicts(tiered, everywhere)) == {"ON_DISK"}
    assert tiered.status().counters.promoted_blocks == promoted
    until(lambda: client.lookup(everywhere).hits == 8, "who asks the disk as well gets them")
    assert client.lookup(everywhere, host_only=True, timeout_s=60).hits == 8, "the host has them now"


async def test_the_async_client_wishes_too(tight: DaemonHost, namespace: Namespace) -> None:
    cache, hashes = Cache(), block_hashes("async", range(4))
    try:
        async with kvtier.aio.Client(
            instance=namespace.tenant,
            namespace=namespace,
            groups=[cache.group],
            memory=cache.memory,
            socket=tight.socket,
        ) as client:
            assert await client.wait_ready(60)
            stored = client.store(hashes, range(4), retention=Retention(host_only=True, hold_s=MANY_S))
            assert (await stored.wait(60)).done
            assert (await client.lookup(hashes, host_only=True, timeout_s=60)).hits == 4
            assert (await client.lookup(hashes, [GroupQuery(0)], host_only=True, timeout_s=60)).hits == 4
            assert tight.status().held_blocks == 4
            client.cool(hashes)
            client.touch(hashes, hold_s=1)
            client.touch(hashes, [GroupQuery(0)], hold_s=1)
            client.cool(hashes, [GroupQuery(0)])
            assert (await client.lookup(hashes, timeout_s=60)).hits == 4, "it was all understood"
            assert client.status.last_error == ""
    finally:
        cache.close()
