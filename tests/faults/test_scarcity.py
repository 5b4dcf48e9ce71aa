"""Descriptors and memory run out: new requests are refused with the reason, and clients that are served stay
served."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvtier.v1 import cache_pb2, side_pb2, types_pb2
from kvtierd.workers.copy.engine import FDS_SPARE

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.integration.daemon.raw import RawSession, Refused
from tests.support.process import DEADLINE_S, Daemon, refused_start, until

BATCH = 32
TMPFS_MIB = 40
FEW = 448
"""Open files of a daemon that wants thousands."""
LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

pytestmark = pytest.mark.faults


def small_tmpfs(folder: Path, before: str = "true") -> list[str]:
    """Words before a command: it runs with a tmpfs of TMPFS_MIB of its own at `folder`, which ends with it.

    `before`: a shell command that is run there first. Fails if this machine does not let us mount one.
    """
    unshare = shutil.which("unshare")
    assert unshare, "unshare (util-linux) is needed to mount a small file system"
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={TMPFS_MIB}m,mode=0700 kvtier-test "$0" && {before} && exec "$@"'
    return [unshare, "--mount", *root, "sh", "-c", mount, str(folder)]


def seen_by(daemon: Daemon, path: Path) -> Path:
    """A file as a daemon in its own mount namespace sees it."""
    return Path(f"/proc/{daemon.pid}/root", *path.parts[1:])


class TestMemory:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tmp_path.chmod(0o700)
        return tmp_path

    def test_a_pool_larger_than_its_file_system_is_refused_with_both_sizes(
        self, socket_dir: Path, folder: Path
    ) -> None:
        status, said = refused_start(socket_dir, folder / "pool", wrap=small_tmpfs(folder))
        assert status == 78
        for part in ("66 MiB", f"{TMPFS_MIB} MiB", "mount -o remount,size=", "pool.path"):
            assert part in said
        assert list(socket_dir.iterdir()) == []

    def test_a_file_system_that_is_full_is_refused_with_what_is_free(
        self, socket_dir: Path, folder: Path
    ) -> None:
        somebody = f"head -c {TMPFS_MIB - 8}M /dev/zero > {folder}/somebody"
        wrap = small_tmpfs(folder, before=somebody)
        status, said = refused_start(socket_dir, folder / "pool", "--pool-size=34MiB", wrap=wrap)
        assert status == 69
        for part in (f"8.0 MiB free of {TMPFS_MIB}.0 MiB", str(folder), "lower pool.size"):
            assert part in said
        assert list(socket_dir.iterdir()) == []

    def test_a_file_system_that_fills_up_later_harms_nobody(
        self, start: Callable[..., Daemon], folder: Path, count: Counter[str]
    ) -> None:
        """All of the pool's memory is there from the start: there is no write that could find none."""
        daemon = start(wrap=small_tmpfs(folder), pool__path=folder / "pool", pool__size="34MiB")
        fill(seen_by(daemon, folder / "somebody"))
        with PlainEngine(daemon.socket, "engine", num_blocks=BATCH) as engine:
            engine.wait_ready()
            batches = [hashes_of(f"full/{number}", BATCH) for number in range(3 * 32 * 64 // BATCH)]
            for hashes in batches:  # three times what the pool holds
                engine.fill(list(range(BATCH)), hashes)
                assert engine.store(hashes, range(BATCH)).wait(DEADLINE_S).done
            for hashes in batches[-8:]:
                load(engine, hashes, count)
        assert daemon.stop() == 0


def fill(path: Path) -> None:
    """Writes until the file system is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(64 << 10)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def no_more_descriptors(pid: int, left: int) -> tuple[int, int]:
    """A process can open `left` more files. Returns the limits that it had."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(len(used) + left + 1) if number not in used]
    return resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[left], LIMIT))


def load(engine: PlainEngine, hashes: list[bytes], count: Counter[str]) -> None:
    """All of them are found, and right."""
    into = list(range(BATCH))
    found = engine.lookup(hashes, lease=True)
    assert found.hits == BATCH
    engine.wipe(into)
    assert engine.load(found, into).wait(DEADLINE_S).done
    compare(engine.read(into), hashes, count)


@pytest.mark.parametrize(("whose", "left"), [("front", 0), ("copy worker", FDS_SPARE // 2)])
def test_without_descriptors_newcomers_wait_and_the_others_are_served(
    whose: str, left: int, start: Callable[..., Daemon], count: Counter[str]
) -> None:
    daemon = start()
    daemon.may_complain = True
    known = hashes_of("known", BATCH)
    with PlainEngine(daemon.socket, "first", num_blocks=BATCH) as engine:
        engine.wait_ready()
        engine.fill(list(range(BATCH)), known)
        assert engine.store(known, range(BATCH)).wait(DEADLINE_S).done
        pid = daemon.pid if whose == "front" else daemon.status().workers[0].pid
        limits = no_more_descriptors(pid, left)
        with PlainEngine(daemon.socket, "second", num_blocks=BATCH) as newcomer:
            assert not newcomer.client.wait_ready(1)
            assert newcomer.client.lookup(known).hits == 0
            for number in range(4):
                load(engine, known, count)
                fresh = hashes_of(f"fresh/{number}", BATCH)
                engine.fill(list(range(BATCH)), fresh)
                assert engine.store(fresh, range(BATCH)).wait(DEADLINE_S).done
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            newcomer.wait_ready()
            load(newcomer, known, count)
        load(engine, known, count)
    until(lambda: not daemon.status().instances, "all are gone")
    assert daemon.status().counters.integrity_failures == 0
    assert daemon.stop() == 0


class ManyGroups(RawSession):
    """An engine whose blocks are in so many groups that each may have an index page."""

    GROUPS = 8

    def hello(self, **changes: Any) -> cache_pb2.Hello:
        [group] = super().hello().groups
        groups = [types_pb2.Group() for _ in range(self.GROUPS)]
        for number, one in enumerate(groups):
            one.CopyFrom(group)
            one.group = number
        return super().hello(**({"groups": groups} | changes))

    def places(self) -> side_pb2.RegisterMemory:
        request = super().places()
        for number in range(1, self.GROUPS):
            group = request.groups.add()
            group.CopyFrom(request.groups[0])
            group.group = number
        return request

    def open_pages(self) -> types_pb2.Error | None:
        """Opens the index page of every group, until one is refused."""
        for group in range(self.GROUPS):
            try:
                _, fds = self.side.call(open_index=side_pb2.OpenIndex(group=group))
            except Refused as refused:
                return refused.error
            for fd in fds:
                os.close(fd)
        return None


def test_clients_that_take_all_descriptors_that_they_may_keep_no_worker_from_being_replaced(
    start: Callable[..., Daemon], count: Counter[str]
) -> None:
    prlimit = shutil.which("prlimit")
    assert prlimit, "prlimit (util-linux) is needed to start a daemon with few descriptors"
    daemon = start(wrap=[prlimit, f"--nofile={FEW}:{FEW}"], server__hello_deadline_s=60)
    daemon.may_complain = True
    known = hashes_of("known", BATCH)
    with PlainEngine(daemon.socket, "first", num_blocks=BATCH) as engine, ExitStack() as stack:
        engine.wait_ready()
        engine.fill(list(range(BATCH)), known)
        assert engine.store(known, range(BATCH)).wait(DEADLINE_S).done
        for page_refused in fill_pages(daemon, stack):
            assert page_refused.reason == types_pb2.REASON_QUEUE_FULL
            assert "as many index pages as its open files allow" in page_refused.message
        for path, kind in ((daemon.side_socket, socket.SOCK_SEQPACKET), (daemon.socket, socket.SOCK_STREAM)):
            for _ in range(2 * FEW):
                silent = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
                if not connected(silent, path):
                    break
        for kill in range(4):
            kill_worker(daemon)
            count["replaced_workers"] += 1
            engine.wait_ready()
            load(engine, known, count)
            fresh = hashes_of(f"fresh/{kill}", BATCH)
            engine.fill(list(range(BATCH)), fresh)
            assert engine.store(fresh, range(BATCH)).wait(DEADLINE_S).done
    assert daemon.stop() == 0


def connected(sock: socket.socket, path: Path) -> bool:
    """Connects. False if nobody has accepted other connections for a second."""
    sock.setblocking(False)
    for _ in range(100):
        try:
            sock.connect(str(path))
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


def fill_pages(daemon: Daemon, stack: ExitStack) -> list[types_pb2.Error]:
    """Opens index pages, each of a namespace of its own, until some are refused."""
    refusals = []
    for number in range(4):
        session = ManyGroups(daemon.socket, fragments=(4096,))
        stack.callback(session.close)
        namespace = types_pb2.Namespace(
            model=f"model-{number}", kv_dtype="uint8", hash_scheme="test:1", hash_bytes=32
        )
        session.ready(instance=f"pages-{number}", namespace=namespace)
        refused = session.open_pages()
        if refused is not None:
            refusals.append(refused)
    assert refusals, "no page was refused"
    return refusals


def kill_worker(daemon: Daemon) -> None:
    """Returns when there is another one."""
    worker = worker_of(daemon)
    os.kill(worker, signal.SIGKILL)
    until(lambda: worker_of(daemon) not in (0, worker), "it is replaced")


def worker_of(daemon: Daemon) -> int:
    """The copy worker's pid; 0 if there is none. It asks no daemon, which may take no connection now."""
    children = Path(f"/proc/{daemon.pid}/task").glob("*/children")
    for pid in [int(pid) for file in children for pid in file.read_text().split()]:
        with contextlib.suppress(OSError):  # it has just ended
            if b"kvtierd.workers.copy" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0
