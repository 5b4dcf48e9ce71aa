"""Ctrl-C and SIGTERM at any moment of a start, and Ctrl-C in kvtierctl: one sentence, nothing left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kvtier.v1 import types_pb2
from kvtierd.memory.pool_file import MAGIC

from tests.integration.daemon.raw import RawSession, hashes
from tests.support.length import rounds
from tests.support.process import DEADLINE_S, Daemon, readable, until

pytestmark = pytest.mark.faults

SEED = 20261123
MOMENTS = rounds(short=12, long=160)
POOL_SIZE = "512MiB"
"""Populated for about as long as everything else takes."""
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def command_of(run: Path, pool: Path) -> list[str]:
    """The installed command, as a person types it."""
    return [
        str(Path(sys.executable).with_name("kvtierd")),
        "serve",
        f"--server-socket={run / 'k.sock'}",
        f"--pool-path={pool}",
        f"--pool-size={POOL_SIZE}",
        "--metrics-listen=127.0.0.1:0",
        "--log-format=json",
    ]


def begin(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts it. Returns when it has taken over its signals: what
    comes before that is the interpreter's."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        process_group=0,
        env=os.environ | {"KVTIER_CONFIG": ""},
    )
    until(lambda: catches(process.pid, signal.SIGTERM), "it has taken over its signals")
    return process


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert found, "it has ended"
    return bool(int(found[1], 16) >> (number - 1) & 1)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Status, stdout, and what of stderr is no line of the log."""
    try:
        said, complained = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, said, [line for line in complained.splitlines() if not line.startswith("{")]


def moments(longest_s: float) -> list[float]:
    """One at random in each of equal parts of the start."""
    randomness = random.Random(SEED)
    return [(number + randomness.random()) * longest_s / MOMENTS for number in range(MOMENTS)]


@pytest.mark.timeout(400)  # it starts dozens of daemons
def test_a_signal_at_any_moment_of_a_start_leaves_nothing(
    socket_dir: Path, shm_dir: Path, proved: Callable[[str], None]
) -> None:
    pool = shm_dir / "pool"
    command = command_of(socket_dir, pool)
    process, began_s = begin(command), time.monotonic()
    assert process.stdout is not None
    assert readable(process.stdout.fileno(), DEADLINE_S)
    whole_s = time.monotonic() - began_s
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process)[::2] == (0, [])
    early = 0
    for number, delay_s in enumerate(moments(1.1 * whole_s)):
        pool.unlink(missing_ok=True)
        sent = (signal.SIGINT, signal.SIGTERM)[number % 2]
        process = begin(command)
        time.sleep(delay_s)
        # Ctrl-C reaches the whole group; systemd's SIGTERM as well.
        os.killpg(process.pid, sent)
        status, said, complaints = ended(process)
        about = f"{sent.name} after {delay_s:.3f} s of {whole_s:.3f} s, seed {SEED}: {status} {complaints}"
        if "is serving" in said:
            assert (status, complaints) == (0, []), about
        else:
            early += 1
            sentence = f"kvtierd: stopped by {sent.name} before it was serving"
            assert (status, complaints) == (STATUS[sent], [sentence]), about
        assert list(socket_dir.iterdir()) == [], about
        assert [each.name for each in shm_dir.iterdir()] in ([], ["pool"]), about
        if pool.exists():
            with pool.open("rb") as file:
                assert file.read(len(MAGIC)) == MAGIC, f"half made: {about}"
    assert early >= MOMENTS // 8, "few of the moments were in the start"
    process = begin(command)
    assert process.stdout is not None
    assert readable(process.stdout.fileno(), DEADLINE_S)
    os.killpg(process.pid, signal.SIGTERM)
    status, said, complaints = ended(process)
    assert (status, complaints) == (0, [])
    assert "is serving" in said
    proved(f"{MOMENTS} signals at any moment of a start: a sentence and a status, nothing half made")


def test_a_pool_that_is_being_made_is_removed(socket_dir: Path, shm_dir: Path) -> None:
    """While its memory is allocated, which takes long for a large one."""
    pool = shm_dir / "pool"
    process = begin(command_of(socket_dir, pool))
    until(lambda: pool.exists() and pool.stat().st_blocks > 0, "it has begun to make the pool")
    os.killpg(process.pid, signal.SIGINT)
    status, said, complaints = ended(process)
    assert (status, said) == (130, "")
    assert complaints == ["kvtierd: stopped by SIGINT before it was serving"]
    assert list(shm_dir.iterdir()) == []


def test_who_waits_for_a_pool_can_be_stopped(daemon: Daemon, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    process = begin([*command_of(tmp_path, daemon.pool), "--pool-lock-timeout-s=600"])
    time.sleep(1)
    assert process.poll() is None, "it waits"
    process.send_signal(signal.SIGTERM)
    status, _, complaints = ended(process)
    assert (status, complaints) == (143, ["kvtierd: stopped by SIGTERM before it was serving"])
    assert list(tmp_path.iterdir()) == []


class TestCtl:
    @pytest.mark.parametrize(
        ("arguments", "after", "status", "sentence"),
        [
            (["top", "--interval=0.1"], "kvtierd", 0, None),
            (["bench", "--size=1MiB", "--block=4KiB"], None, 130, "kvtierctl: interrupted"),
            (["drain"], "waiting for 1 transfer", 130, "the daemon goes on draining"),
            (["status"], None, 130, "kvtierctl: interrupted"),
        ],
        ids=["top", "bench", "drain", "status"],
    )
    def test_an_interrupt_is_one_line_at_most(
        self,
        daemon: Daemon,
        session: RawSession,
        arguments: list[str],
        after: str | None,
        status: int,
        sentence: str | None,
    ) -> None:
        """`after`: what it has to say first; None: as soon as it runs."""
        if arguments == ["drain"]:  # waits for a transfer that waits for its doorbell
            gate = {"gate": types_pb2.GATE_DOORBELL, "doorbell": 0, "doorbell_value": 1}
            session.attached.call(store=session.store_request(hashes(1), [0], **gate))
        kvtierctl = str(Path(sys.executable).with_name("kvtierctl"))
        process = begin([kvtierctl, *arguments, f"--socket={daemon.socket}"])
        assert process.stdout is not None
        if after is not None:
            assert readable(process.stdout.fileno(), DEADLINE_S)
            assert after in os.read(process.stdout.fileno(), 1 << 16).decode()
        process.send_signal(signal.SIGINT)
        found, _, complaints = ended(process)
        if after is None and found == 0:
            return  # it was done before
        assert found == status
        assert len(complaints) == (0 if sentence is None else 1), complaints
        assert sentence is None or sentence in complaints[0]
        if arguments == ["drain"]:
            assert daemon.status().state == "draining"


def test_a_bench_that_is_interrupted_clears_what_it_has_stored(daemon: Daemon) -> None:
    kvtierctl = str(Path(sys.executable).with_name("kvtierctl"))
    for _ in range(10):  # one may be done before it is interrupted
        process = begin([kvtierctl, "bench", "--size=8MiB", "--block=4KiB", f"--socket={daemon.socket}"])
        until(lambda: daemon.status().blocks.ready > 0 or process.poll() is not None, "it stores")  # noqa: B023
        process.send_signal(signal.SIGINT)
        status, said, complaints = ended(process)
        if status != 0:
            break
    assert (status, said) == (130, "")
    assert complaints == ["kvtierctl: interrupted; what was stored for it is cleared"]
    assert daemon.status().blocks.ready == 0
