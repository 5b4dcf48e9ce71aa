"""A pool that gets its memory while it serves: the file system fills up meanwhile, the daemon is killed, the
process that gets the memory is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.faults.campaigns.content import BLOCK_BYTES, compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.faults.campaigns.place import Place
from tests.support.process import Daemon, refused_start, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

MIB = 1 << 20
POOL_MIB = 770
"""Three areas."""
AREA_MIB = 256
TMPFS_MIB = 790
SETTINGS = {"pool__size": f"{POOL_MIB}MiB", "pool__extent_size": "16MiB"}
BATCH = 512


def usable_mib(daemon: Daemon) -> int:
    return daemon.status().pool.populated_bytes // MIB


def store(engine: PlainEngine, family: str, blocks: int) -> list[bytes]:
    """Some blocks, with the bytes that are theirs."""
    hashes = hashes_of(family, blocks)
    engine.fill(list(range(blocks)), hashes)
    assert engine.store(hashes, list(range(blocks))).wait(60).done
    return hashes


def flood(engine: PlainEngine, mib: int) -> None:
    """So many blocks of any content."""
    for number in range(mib * MIB // BLOCK_BYTES // BATCH):
        engine.store(hashes_of(f"flood-{number}", BATCH), list(range(BATCH))).wait(60)


def check(engine: PlainEngine, hashes: list[bytes], count: Counter[str]) -> None:
    """All are found, with every byte."""
    found = engine.lookup(hashes, lease=True)
    count["lost_blocks"] += len(hashes) - found.hits
    assert found.hits == len(hashes)
    ids = list(range(len(hashes)))
    engine.wipe(ids)
    assert engine.load(found, ids).wait(60).done
    compare(engine.read(ids), hashes, count)


def getting_memory(daemon: Daemon) -> list[int]:
    """The process that gets the pool's memory, if it runs."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"populate_rest" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def place() -> Iterator[Place]:
    with Place() as place:
        yield place


def test_a_daemon_killed_while_its_pool_grows_goes_on_where_it_was(
    place: Place, count: Counter[str], proved: Callable[[str], None]
) -> None:
    daemon = place.start_growing(**SETTINGS)
    before = usable_mib(daemon)
    with PlainEngine(daemon.socket, "survivor", num_blocks=BATCH) as engine:
        engine.wait_ready()
        hashes = store(engine, "before", 64)
        daemon.kill()
        daemon = place.start_growing(**SETTINGS)
        pool = daemon.status().pool
        assert pool.start == "warm", pool.cold_reason
        assert pool.recovered_blocks == len(hashes)
        assert pool.populated_bytes // MIB >= before
        engine.wait_ready()
        check(engine, hashes, count)
        until(lambda: usable_mib(daemon) == POOL_MIB - 2, "the whole pool can be used")
        flood(engine, 64)
        check(engine, hashes, count)
        assert daemon.status().pool.shortage == ""
        until(lambda: getting_memory(daemon) == [], "nothing is left that asks for memory")
    assert daemon.stop() == 0
    proved(
        f"a daemon was killed when {before} MiB of its pool had memory: {len(hashes)} blocks were found again"
    )


def test_a_pool_whose_memory_cannot_be_had_stays_small_and_serves(place: Place, count: Counter[str]) -> None:
    """Here because the process that asks for it is killed, as the kernel does if memory is short."""
    daemon = place.start_growing(**SETTINGS)
    daemon.may_complain = True
    until(lambda: getting_memory(daemon), "a process asks for memory")
    os.kill(getting_memory(daemon)[0], signal.SIGKILL)
    until(lambda: daemon.status().pool.shortage, "the daemon says that it stays small")
    pool = daemon.status().pool
    assert pool.shortage == "the process that asks for it was killed by SIGKILL"
    assert pool.populated_bytes < pool.capacity_bytes
    allocated = daemon.pool.stat().st_blocks * 512
    assert allocated == 2 * MIB + pool.populated_bytes, "what cannot be used is given back"
    assert daemon.metrics()["kvtier_pool_short_bytes"] == pool.capacity_bytes - pool.populated_bytes
    assert "there is no memory for the rest" in daemon.log()
    with PlainEngine(daemon.socket, "engine", num_blocks=BATCH) as engine:
        engine.wait_ready()
        longest = engine.client.prefix_tokens_max
        assert 0 < longest * BLOCK_BYTES // 16 <= pool.populated_bytes
        flood(engine, pool.populated_bytes // MIB + 16)
        check(engine, store(engine, "after", 64), count)
        assert daemon.status().counters.evicted_blocks > 0
    assert daemon.pool.stat().st_blocks * 512 == allocated, "nothing lies outside"
    assert daemon.stop() == 0


class SmallFileSystem:
    """A tmpfs in a mount namespace that outlives daemons."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        """`daemon` was started in `mounting(folder)`."""
        self._folder = os.open(f"/proc/{daemon.pid}/root{folder}", os.O_DIRECTORY)
        self._namespace = os.open(f"/proc/{daemon.pid}/ns/mnt", os.O_RDONLY)

    @property
    def inside(self) -> list[str]:
        """Words before a command that is to run there."""
        return ["nsenter", f"--mount=/proc/{os.getpid()}/fd/{self._namespace}"]

    def fill(self) -> None:
        """Takes all that is left."""
        ballast = os.open("ballast", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._folder)
        try:
            with suppress(OSError):
                while True:
                    os.posix_fallocate(ballast, os.fstat(ballast).st_size, 4 * MIB)
        finally:
            os.close(ballast)

    def empty(self) -> None:
        os.unlink("ballast", dir_fd=self._folder)

    def close(self) -> None:
        os.close(self._folder)
        os.close(self._namespace)


def mounting(folder: Path) -> list[str]:
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={TMPFS_MIB}m,mode=0700 kvtier-test "$0" && exec "$@"'
    return ["unshare", "--mount", *root, "sh", "-c", mount, str(folder)]


@contextmanager
def small_file_system(folder: Path, daemon: Daemon) -> Iterator[SmallFileSystem]:
    place = SmallFileSystem(folder, daemon)
    try:
        yield place
    finally:
        place.close()


@contextmanager
def killed(daemon: Daemon) -> Iterator[Daemon]:
    """Ends the daemon if the test has not."""
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="entering a namespace of mounts again takes root")
def test_a_file_system_that_fills_up_meanwhile(
    shm_dir: Path, socket_dir: Path, count: Counter[str], proved: Callable[[str], None]
) -> None:
    pool_path = shm_dir / "pool"
    with ExitStack() as stack:
        daemon = stack.enter_context(
            killed(Daemon(socket_dir, pool_path, wrap=mounting(shm_dir), **SETTINGS))
        )
        daemon.may_complain = True
        place = stack.enter_context(small_file_system(shm_dir, daemon))
        place.fill()
        until(lambda: daemon.status().pool.shortage, "the daemon says that it stays small")
        place.fill()
        pool = daemon.status().pool
        assert pool.shortage, "it is told"
        assert AREA_MIB * MIB <= pool.populated_bytes < pool.capacity_bytes
        with PlainEngine(daemon.socket, "engine", num_blocks=BATCH) as engine:
            engine.wait_ready()
            flood(engine, pool.populated_bytes // MIB + 16)
            hashes = store(engine, "after", 64)
            check(engine, hashes, count)
        assert daemon.stop() == 0
        flags = [f"--{key.replace('__', '-').replace('_', '-')}={value}" for key, value in SETTINGS.items()]
        status, said = refused_start(socket_dir, pool_path, *flags, wrap=place.inside)
        assert status == 69, said
        assert "pool.size" in said
        place.empty()
        daemon = stack.enter_context(killed(Daemon(socket_dir, pool_path, wrap=place.inside, **SETTINGS)))
        assert daemon.status().pool.start == "warm"
        until(lambda: usable_mib(daemon) == POOL_MIB - 2, "the whole pool can be used")
        with PlainEngine(daemon.socket, "engine", num_blocks=BATCH) as engine:
            engine.wait_ready()
            check(engine, hashes, count)
        assert daemon.stop() == 0
    proved(
        f"a file system filled up when {pool.populated_bytes // MIB} MiB of {POOL_MIB} MiB had memory: the"
        " daemon went on with these, was refused a start, and found its blocks when there was room"
    )
