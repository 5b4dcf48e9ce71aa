"""kvtierctl clear against a real daemon, its pool and its disks: what was dropped is gone, kill -9 or not."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvtier import Namespace

from tests.integration.daemon.tier import Connect, Tier, batch, load_all, settled, written
from tests.integration.daemon.tier import connect as connect
from tests.integration.daemon.tier import tier as tier
from tests.support.plain_client import BLOCKS, PlainClient
from tests.support.process import DEADLINE_S, Daemon, until

pytestmark = pytest.mark.faults
Start = Callable[..., Daemon]

OTHER = Namespace(model="tests/other", kv_dtype="uint8", hash_scheme="tests:name", hash_bytes=32)


def ctl(daemon: Daemon, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "kvtierd.ctl", *arguments, f"--socket={daemon.socket}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def cleared(daemon: Daemon, *arguments: str, code: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(ctl(daemon, "clear", "--yes", "--json", *arguments, code=code))
    return answer


def clear_all(daemon: Daemon) -> None:
    """Until nothing was on its way to a disk while it was cleared: such blocks stay, and are counted."""
    until(lambda: cleared(daemon)["under_way_blocks"] == 0, "all is cleared")


def digest_of(daemon: Daemon, model: str) -> str:
    found = json.loads(ctl(daemon, "namespaces", "--json"))["namespaces"]
    [digest] = {each["namespace_digest"] for each in found if each["model"] == model}
    return str(digest)


def hits(plain: PlainClient, hashes: Sequence[bytes]) -> int:
    return plain.lookup(hashes).hits


def idle(daemon: Daemon) -> None:
    """Returns when nothing is leased or copied: a load is over for its client before it is for the daemon."""
    until(lambda: not (daemon.status().leases or daemon.status().transfers_active), "nothing is in use")


def test_what_was_cleared_is_not_found_again_after_kill_nine(start: Start, connect: Connect) -> None:
    daemon, plain = start(), connect()
    assert plain.store(batch("a", 0)).done
    said = cleared(daemon)
    assert (said["cleared_blocks"], said["held_blocks"], said["under_way_blocks"]) == (BLOCKS, 0, 0)
    assert said["unsettled_paths"] == []
    assert hits(plain, batch("a", 0)) == 0
    assert plain.store(batch("b", 0)).done
    daemon.kill()
    daemon = start()
    plain.ready()
    assert daemon.status().pool.recovered_blocks == BLOCKS
    assert hits(plain, batch("a", 0)) == 0
    assert plain.load(batch("b", 0)) == BLOCKS
    assert "cleared" not in ctl(daemon, "explain", batch("b", 0)[0].hex())


def test_leased_blocks_stay_and_can_be_loaded(start: Start, connect: Connect) -> None:
    daemon, plain = start(), connect()
    hashes = batch("a", 0)
    assert plain.store(hashes).done
    with plain.lookup(hashes[:10], lease=True) as leased:
        said = cleared(daemon)
        assert (said["cleared_blocks"], said["held_blocks"]) == (BLOCKS - 10, 10)
        assert plain.client.load(leased, range(10)).wait(DEADLINE_S).done
    idle(daemon)
    assert "10 blocks dropped" in ctl(daemon, "clear", "--yes")
    assert "cleared" in ctl(daemon, "explain", hashes[0].hex())


def test_one_namespace_only(start: Start, socket_dir: Path, connect: Connect) -> None:
    daemon, plain = start(), connect()
    assert plain.store(batch("a", 0)).done
    with PlainClient(daemon.socket, "other", OTHER) as other:
        other.ready()
        assert other.store(batch("a", 0)).done
        digest = digest_of(daemon, OTHER.model)
        assert cleared(daemon, f"--namespace={digest}")["cleared_blocks"] == BLOCKS
        assert hits(other, batch("a", 0)) == 0
    assert plain.load(batch("a", 0)) == BLOCKS
    ctl(daemon, "clear", "--yes", "--namespace=" + "0" * 32, code=69)
    ctl(daemon, "clear", "--namespace=", code=2)
    assert plain.load(batch("a", 0)) == BLOCKS


def test_without_a_terminal_it_drops_nothing(start: Start, connect: Connect) -> None:
    """Nor where a script pipes an answer: nobody has read what it would drop."""
    daemon, plain = start(), connect()
    assert plain.store(batch("a", 0)).done
    for answer, arguments in (("", []), ("y\n", []), ("y\n", ["--json"]), ("", ["--namespace=0"])):
        command = [sys.executable, "-m", "kvtierd.ctl", "clear", f"--socket={daemon.socket}", *arguments]
        done = subprocess.run(
            command, input=answer, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert "add --yes" in done.stderr
    assert hits(plain, batch("a", 0)) == BLOCKS
    assert plain.load(batch("a", 0)) == BLOCKS


def test_on_a_terminal_it_asks_before(start: Start, connect: Connect) -> None:
    daemon, plain = start(), connect()
    assert plain.store(batch("a", 0)).done

    def answered(text: str, *arguments: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "kvtierd.ctl", "clear", f"--socket={daemon.socket}", *arguments]
        os.write(ours, text.encode())
        done = subprocess.run(
            command, stdin=theirs, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        os.close(theirs)
        os.close(ours)
        return done.returncode, done.stdout + done.stderr

    status, said = answered("", "--json")
    assert (status, "Drop" in said, "add --yes" in said) == (2, False, True), said
    for no in ("n\n", "\n", "yeah\n", "\x04"):  # the last is the end of the input
        status, said = answered(no)
        asked = "Drop 64 blocks in memory and 0 blocks on disks, of all namespaces (1)?"
        assert (status, asked in said) == (75, True), said
        assert "nothing was dropped" in said
    status, said = answered("n\n", "--namespace=zzz")
    assert (status, "Drop 0 blocks in memory and 0 blocks on disks, of namespace zzz?" in said) == (75, True)
    assert plain.load(batch("a", 0)) == BLOCKS
    idle(daemon)
    status, said = answered("y\n")
    assert (status, "64 blocks dropped" in said) == (0, True), said
    assert plain.store(batch("a", 0)).done
    status, said = answered("", "--yes")
    assert (status, "64 blocks dropped" in said, "Drop" in said) == (0, True, False), said


class TestDisks:
    def test_it_is_gone_from_memory_and_disks_after_kill_nine_of_everybody(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(2, write_mode="through")), connect()
        plain.store(batch("a", 0))
        written(daemon, BLOCKS)
        settled(daemon)
        said = cleared(daemon)
        assert said["cleared_blocks"] == BLOCKS
        assert said["host_bytes"] == said["disk_bytes"] > 0
        assert said["unsettled_paths"] == []
        daemon.may_complain = True  # it may live to see them go
        workers = [worker.pid for worker in daemon.status().workers]
        for pid in workers:
            os.kill(pid, 9)
        daemon.kill()
        daemon = start(**tier.settings(2, write_mode="through"))
        daemon.may_complain = True
        plain.ready()
        assert sum(each.recovered_blocks for each in daemon.status().disks) == 0
        assert daemon.status().pool.recovered_blocks == 0
        assert hits(plain, batch("a", 0)) == 0
        plain.store(batch("a", 0))
        load_all(plain, batch("a", 0))

    def test_what_disks_had_dropped_before_does_not_come_back_either(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        """A block that was evicted from a disk is in its file until its place is used again."""
        settings = tier.settings(write_mode="through") | {"disk__size": "6MiB"}
        daemon, plain = start(**settings), connect()
        for number in range(8):
            plain.store(batch("a", number))
            settled(daemon)
        assert daemon.status().disks[0].evicted_blocks > 0
        clear_all(daemon)
        daemon.kill()
        daemon = start(**settings)
        plain.ready()
        assert daemon.status().disks[0].recovered_blocks == 0
        assert not any(hits(plain, batch("a", number)) for number in range(8))

    def test_a_disk_that_fails_is_named_and_told_when_it_is_well(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through", errors_max=1000)), connect()
        daemon.may_complain = True
        plain.store(batch("a", 0))
        written(daemon, BLOCKS)
        settled(daemon)
        tier.fail(records={"errno": "EIO"})
        said = cleared(daemon, "--timeout=0.5", code=75)
        assert said["cleared_blocks"] == BLOCKS
        assert said["unsettled_paths"] == [str(tier.paths[0])]
        assert hits(plain, batch("a", 0)) == 0
        tier.fail()
        assert cleared(daemon)["unsettled_paths"] == []
        daemon.kill()
        daemon = start(**tier.settings(write_mode="through"))
        daemon.may_complain = True
        plain.ready()
        assert daemon.status().disks[0].recovered_blocks == 0
        assert hits(plain, batch("a", 0)) == 0
