"""A recording of a live daemon, simulated, hits what the daemon has hit; and what a recording may not do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import grpc
import numpy as np
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc, cache_pb2
from kvtierd.core.blocks.blocks import HISTORY_PART, REMEMBERED_BYTES
from kvtierd.ctl.recorder import RecordWriter
from kvtierd.simulate.host import SimulatedHost, hashes_of
from kvtierd.simulate.records import read_traces
from kvtierd.simulate.results import replayed

from tests.integration.daemon.commands import admin, kvtierctl
from tests.integration.daemon.raw import RawSession
from tests.integration.daemon.traced import FRAGMENT, POOL, Connect, ask, engine, prompts, request, store
from tests.support.process import DEADLINE_S, Daemon, until

Start = Callable[..., Daemon]
CAPACITY = POOL.extents * POOL.slots_per_extent(FRAGMENT)
HISTORY = POOL.capacity_bytes // HISTORY_PART // REMEMBERED_BYTES
ANSWER_BLOCKS = 3
TOGETHER = 3
"""Requests that are looked up before the first of them is stored."""


@contextmanager
def recording(daemon: Daemon, folder: Path, *options: str) -> Iterator[list[str]]:
    """`kvtierctl record` meanwhile; what it has said is there when the context is over."""
    command = [sys.executable, "-m", "kvtierd.ctl", "record", f"--socket={daemon.socket}", str(folder)]
    recorder = subprocess.Popen([*command, *options], stdout=PIPE, stderr=PIPE, text=True)
    said: list[str] = []
    try:
        until(folder.exists, "it records")  # it makes the folder after the daemon's first message
        yield said
    finally:
        recorder.send_signal(signal.SIGINT)
        said += recorder.communicate(timeout=DEADLINE_S)
    assert recorder.returncode == 0, said


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_a_recording_simulated_hits_what_the_daemon_has_hit(
    start: Start, connect: Connect, tmp_path: Path, policy: str
) -> None:
    daemon = start(pool__policy=policy, pool__size="66MiB", pool__extent_size="1MiB")
    daemon.wait_whole()
    one = engine(connect)
    folder = tmp_path / "records"
    with recording(daemon, folder, "--file-bytes=1MiB") as said:
        given = [request(one, prompt) for prompt in prompts()]
    assert " dropped" not in said[0]
    assert f"kvtierctl simulate {folder}" in said[0]
    trace, notes = read_traces([folder])
    assert notes == []
    assert trace.live is not None
    assert trace.live.hits.tolist() == given
    simulated = SimulatedHost(CAPACITY, ranks=policy == "reuse", history_blocks=HISTORY)
    found = list(replayed(simulated, trace, list(trace.paths()), lambda done: None))
    assert found == given, "block for block"
    assert [len(path) for path in trace.paths()] == [len(prompt) for prompt in prompts()]


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_requests_that_overlap_and_stores_of_what_is_new_only(
    start: Start, connect: Connect, tmp_path: Path, policy: str
) -> None:
    """As engines do it: several requests are looked up before the first of them is stored, and only what was
    computed is, with the blocks of an answer."""
    daemon = start(pool__policy=policy, pool__size="66MiB", pool__extent_size="1MiB")
    daemon.wait_whole()
    one = engine(connect)
    folder = tmp_path / "records"
    given: list[int] = []
    chosen = prompts()[:400]
    with recording(daemon, folder):
        for first in range(0, len(chosen), TOGETHER):
            batch = chosen[first : first + TOGETHER]
            hits = [ask(one, prompt[:-1]) if len(prompt) > 1 else ask(one, prompt) for prompt in batch]
            for prompt, there in zip(batch, hits, strict=True):
                if there < len(prompt):
                    store(one, prompt, there)
            given += hits
    trace, notes = read_traces([folder])
    assert notes == []
    simulated = SimulatedHost(CAPACITY, ranks=policy == "reuse", history_blocks=HISTORY)
    assert list(replayed(simulated, trace, list(trace.paths()), lambda done: None)) == given
    assert trace.generated(), "the last block of a prompt was not asked for"


def test_an_answer_is_stored_and_not_asked_for(daemon: Daemon, connect: Connect, tmp_path: Path) -> None:
    """Engines store what they have computed only, and what they have generated; the next turn hits it."""
    one = engine(connect)
    folder = tmp_path / "records"
    given = []
    with recording(daemon, folder):
        for turn in (np.arange(10), np.arange(10 + ANSWER_BLOCKS + 4)):
            given.append(ask(one, turn))
            store(one, turn, given[-1])
            store(one, np.arange(len(turn) + ANSWER_BLOCKS), len(turn))
    assert given == [0, 10 + ANSWER_BLOCKS]
    trace, notes = read_traces([folder])
    assert notes == []
    assert trace.blocks == 17 + ANSWER_BLOCKS
    assert list(replayed(SimulatedHost(1_000), trace, list(trace.paths()), lambda done: None)) == given
    figures = json.loads(
        kvtierctl_simulate(folder, "--capacity=100%", "--policy=lru,reuse,optimum,arc", "--json")
    )
    for policy in ("lru", "reuse", "optimum", "arc"):
        assert figures[policy]["100%"]["block_hit_rate"] == pytest.approx(13 / 27)
    assert figures["trace"]["daemon_token_hit_rate"] == pytest.approx(13 / 27)


def kvtierctl_simulate(*arguments: object) -> str:
    command = [sys.executable, "-m", "kvtierd.ctl", "simulate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lookups_that_ask_again_or_for_single_blocks_are_left_out(
    session: RawSession, daemon: Daemon
) -> None:
    hashes = hashes_of(np.arange(4)).tobytes()
    with admin(daemon) as stub:
        call = stub.Record(admin_pb2.RecordRequest(), timeout=DEADLINE_S)
        assert not next(call).events
        session.attached.call(lookup=session.lookup_request(hashes, again=True))
        exact = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=hashes)
        session.attached.call(lookup=session.lookup_request(b"", queries=[exact]))
        session.lookup(hashes)
        batch = next(each for each in call if each.events)
        [[kind, _, _, count, hits, _]] = np.frombuffer(batch.events, "<u8").reshape(-1, 6).tolist()
        assert (kind, count, hits) == (admin_pb2.RECORDED_KIND_LOOKUP, 4, 0)
        assert len(set(np.frombuffer(batch.hashes, np.uint64).tolist())) == 4
        [place] = batch.places
        assert (place.number, place.tenant, place.group, place.block_tokens) == (1, 1, 0, 16)
        assert place.block_bytes == sum(session.fragments)
        call.cancel()


def test_one_records_at_a_time_and_another_can_when_it_is_gone(daemon: Daemon) -> None:
    with admin(daemon) as stub:
        first = stub.Record(admin_pb2.RecordRequest(), timeout=DEADLINE_S)
        next(first)
        with pytest.raises(grpc.RpcError, match="somebody records already"):
            next(stub.Record(admin_pb2.RecordRequest(), timeout=DEADLINE_S))
        first.cancel()

        def records() -> bool:
            try:
                call = stub.Record(admin_pb2.RecordRequest(), timeout=DEADLINE_S)
                next(call)
                call.cancel()
            except grpc.RpcError:
                return False
            return True

        until(records, "the first has gone")


def test_a_recorder_that_does_not_read_holds_nobody_up_and_misses_are_counted(
    daemon: Daemon, session: RawSession, tmp_path: Path
) -> None:
    """Far more than what the daemon, gRPC and the sockets keep for a reader."""
    hashes = hashes_of(np.arange(8_192)).tobytes()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options) as channel:
        call = admin_pb2_grpc.AdminStub(channel).Record(admin_pb2.RecordRequest(), timeout=DEADLINE_S)
        next(call)
        for _ in range(400):  # 25 MiB, as they are sent
            session.lookup(hashes)
        writer = RecordWriter(tmp_path / "records", 64 << 20, 1 << 30)
        session.lookup(hashes_of(np.arange(1)).tobytes())
        for batch in call:
            writer.add(batch)
            if len(batch.hashes) % (8 * 8_192) == 8 or (batch.dropped_events and not batch.events):
                break
        call.cancel()
    writer.write(ended=True)
    assert writer.dropped_events > 0
    assert writer.dropped_blocks >= 8_192 * (writer.dropped_events - 1)
    assert writer.requests + writer.dropped_events == 401
    _, notes = read_traces([tmp_path / "records"])
    assert any("were dropped while it was recorded" in note for note in notes)


def test_a_daemon_that_ends_leaves_a_whole_recording(start: Start, connect: Connect, tmp_path: Path) -> None:
    daemon = start()
    one = engine(connect)
    folder = tmp_path / "records"
    command = [sys.executable, "-m", "kvtierd.ctl", "record", f"--socket={daemon.socket}", str(folder)]
    recorder = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)
    until(folder.exists, "it records")
    for prompt in prompts()[:5]:
        request(one, prompt)
    time.sleep(0.5)
    assert daemon.stop() == 0
    out, err = recorder.communicate(timeout=DEADLINE_S)
    trace, notes = read_traces([folder])
    assert (trace.requests, notes) == (5, [])
    assert "5 requests" in out
    assert recorder.returncode in (0, 69), err


def test_a_folder_with_another_recording_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    assert kvtierctl(daemon, "record", str(tmp_path), "--for", "0.5s").returncode == 0
    again = kvtierctl(daemon, "record", str(tmp_path), "--for", "0.5s")
    assert again.returncode == 2
    assert f"FOLDER: {tmp_path} has another recording" in again.stderr
    wrong = kvtierctl(daemon, "record", str(tmp_path), "--for", "soon")
    assert (wrong.returncode, "'soon' is no time: write one such as 90s" in wrong.stderr) == (2, True)
