"""Copy workers of GPUs: started when asked for, shared, replaced, ended. Nothing of an engine outlives it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtier.v1 import side_pb2, types_pb2

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.gpu import ConnectGpu, FakeGpu, gpu_workers
from tests.integration.daemon.looks import maps_of_clients
from tests.integration.daemon.raw import RawSession, Refused, hashes
from tests.support.fake_cuda import FakeCuda
from tests.support.process import DEADLINE_S, Daemon, until

pytestmark = pytest.mark.fake_gpu

SLOW_START = "cuDevicePrimaryCtxRetain:1:1500"
SLOWER_START = "cuDevicePrimaryCtxRetain:1:6000"
"""Long enough for a busy machine to kill it meanwhile."""
HUNG_START = "cuDevicePrimaryCtxRetain:1:0"
"""Until the test lifts it."""
DONE = types_pb2.TRANSFER_STATE_DONE


@pytest.fixture
def fake(make_fake_cuda: Callable[..., FakeCuda]) -> FakeCuda:
    return make_fake_cuda(devices=2, context_bytes=64 << 20)


@pytest.fixture
def daemon(start: Start, gpu: FakeGpu) -> Daemon:
    return start()


def registers_again(session: RawSession) -> bool:
    """Once the worker that was lost has a successor."""
    try:
        session.register_words()
    except Refused as refused:
        if refused.reason != "WORKER_UNAVAILABLE":
            raise
        return False
    session.register_memory()
    return True


class TestOnDemand:
    def test_no_process_touches_a_gpu_before_a_session_names_it(
        self, daemon: Daemon, connect: Connect, connect_gpu: ConnectGpu, gpu: FakeGpu
    ) -> None:
        connect().ready(instance="on the CPU").store(hashes(1), [0])
        assert gpu.workers() == []
        session = connect_gpu().ready()
        assert gpu.workers() == [session.worker_pid]
        [worker] = gpu_workers(daemon)
        assert (worker.device, worker.pid, worker.state) == (gpu.name, session.worker_pid, "live")
        assert worker.mapped_bytes == len(session.memory)

    def test_blocks_go_to_the_pool_and_come_back(
        self, daemon: Daemon, connect_gpu: ConnectGpu, connect: Connect
    ) -> None:
        session = connect_gpu().ready()
        session.fill(1)
        keys = hashes(8)
        stored = [session.block(number) for number in range(8)]
        assert session.store(keys, range(8)).state == DONE
        session.fill(2)
        assert session.load(keys, range(20, 28)).state == DONE
        assert [session.block(number) for number in range(20, 28)] == stored
        host = connect().ready(instance="on the CPU")
        assert host.load(keys, range(8)).state == DONE
        assert [host.block(number) for number in range(8)] == stored, "devices share what they store"
        metrics = daemon.metrics()
        assert metrics[f"kvtier_device_mapped_bytes.{session.device}"] == len(session.memory)
        assert metrics["kvtier_device_mapped_bytes.cpu"] == len(host.memory)
        assert metrics["kvtier_client_mapped_bytes"] == len(session.memory) + len(host.memory)
        assert metrics[f"kvtier_worker_live.{session.device}"] == 1
        until(
            lambda: daemon.metrics()[f"kvtier_pool_registered_bytes.{session.device}"] >= 64 << 20,
            "the pool is registered in the background",
        )
        assert gpu_workers(daemon)[0].registered_bytes >= 64 << 20

    def test_sessions_that_ask_at_once_share_one_worker(
        self, start: Start, connect_gpu: ConnectGpu, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_CUDA_HANG", HUNG_START)
        daemon = start()
        crowd = [connect_gpu() for _ in range(6)]
        for number, session in enumerate(crowd):
            session.attach(instance=f"engine {number}")
        for session in crowd:
            session.request_words()
        until(lambda: gpu_workers(daemon), "a worker is being started")
        [worker] = gpu_workers(daemon)
        assert worker.state == "starting"

        def came_up() -> bool:
            gpu.fake.lift(worker.pid)
            return bool(gpu_workers(daemon)[0].state == "live")

        until(came_up, "its context is made")
        pids = {session.side.receive()[0].words_registered.worker_pid for session in crowd}
        assert pids == {gpu_workers(daemon)[0].pid}
        assert gpu_workers(daemon)[0].state == "live"

    def test_each_gpu_has_a_worker_of_its_own(
        self, daemon: Daemon, connect_gpu: ConnectGpu, fake: FakeCuda, gpu: FakeGpu
    ) -> None:
        second = FakeGpu(fake, 1)
        here, there = connect_gpu(), connect_gpu(gpu=second)
        here.ready()
        there.ready(instance="there")
        assert here.worker_pid != there.worker_pid
        assert {worker.device for worker in gpu_workers(daemon)} == {gpu.name, second.name}
        for session in (here, there):
            seen = fake.calls("cuDeviceGetUuid_v2", session.worker_pid)
            assert seen == 1, "it sees its own GPU alone, because cuInit touches all that are visible"
        for session in (here, there):
            session.fill(session.worker_pid)
            assert session.store(hashes(2, seed=session.worker_pid), [0, 1]).state == DONE
        os.kill(there.worker_pid, signal.SIGKILL)
        daemon.may_complain = True
        until(lambda: len(gpu_workers(daemon)) == 1, "gone")
        assert here.store(hashes(2, seed=5), [3, 4]).state == DONE, "the other GPU is untouched"

    @pytest.mark.parametrize("method", ["batch", "loop", "rows"])
    def test_the_copy_method_can_be_chosen(
        self, start: Start, connect_gpu: ConnectGpu, gpu: FakeGpu, method: str
    ) -> None:
        start(workers__gpu_copy_method=method, workers__seal_threads=1)
        session = connect_gpu().ready()
        session.fill(1)
        stored = session.block(3)
        session.store(hashes(1), [3])
        session.load(hashes(1), [9])
        assert session.block(9) == stored
        command = Path(f"/proc/{session.worker_pid}/cmdline").read_bytes().split(b"\0")
        assert command[command.index(b"--copy-method") + 1] == method.encode()
        assert command[command.index(b"--seal-threads") + 1] == b"1"


class TestIdle:
    def test_a_worker_that_nobody_uses_is_ended_and_frees_its_context(
        self, start: Start, connect_gpu: ConnectGpu, fake: FakeCuda, gpu: FakeGpu
    ) -> None:
        daemon = start(workers__gpu_idle_s=0.6)
        session = connect_gpu().ready()
        session.fill(1)
        session.store(hashes(1), [0])
        stored = session.block(0)
        time.sleep(1.5)
        assert session.store(hashes(1, seed=2), [1]).state == DONE, "it is in use, though nothing moves"
        with_worker = fake.hbm_used(contexts=True)
        session.close()
        until(lambda: not gpu_workers(daemon), "ended")
        assert gpu.workers() == []
        assert fake.hbm_used(contexts=True) < with_worker
        metrics = daemon.metrics()
        assert f"kvtier_worker_live.{gpu.name}" not in metrics, "no alarm"
        assert metrics[f"kvtier_worker_respawns_total.{gpu.name}"] == 0
        again = connect_gpu().ready()
        assert again.worker_pid != session.worker_pid
        again.load(hashes(1), [7])
        assert again.block(7) == stored
        assert '"copy worker ended"' in daemon.log()

    def test_unregistered_memory_is_not_in_use(
        self, start: Start, connect_gpu: ConnectGpu, gpu: FakeGpu
    ) -> None:
        daemon = start(workers__gpu_idle_s=0.3)
        session = connect_gpu().ready()
        session.side.call(unregister_memory=side_pb2.UnregisterMemory(registration_id=session.registration))
        assert gpu.imports() == 0
        until(lambda: not gpu_workers(daemon), "ended while its session lives: the engine sleeps")
        session.register_words()
        session.register_memory()
        session.fill(2)
        assert session.store(hashes(1), [0]).state == DONE

    def test_a_daemon_that_stops_ends_workers_of_all_devices(
        self, daemon: Daemon, connect_gpu: ConnectGpu, gpu: FakeGpu
    ) -> None:
        session = connect_gpu().ready()
        assert daemon.stop() == 0
        assert session.attached.goodbye() == "DRAINING"
        assert gpu.workers() == []


@pytest.mark.faults
class TestLoss:
    def test_a_lost_worker_is_replaced_when_a_session_registers_again(
        self, daemon: Daemon, connect_gpu: ConnectGpu, gpu: FakeGpu
    ) -> None:
        daemon.may_complain = True
        session = connect_gpu().ready()
        session.fill(1)
        keys = hashes(2)
        session.store(keys, [0, 1])
        stored = session.block(1)
        os.kill(session.worker_pid, signal.SIGKILL)
        event = session.attached.event("instance")
        while not event.reregister_ranks:
            event = session.attached.event("instance")
        until(lambda: gpu.workers() == [], "its process is gone")
        assert gpu.imports() == 0
        time.sleep(0.5)
        assert gpu.workers() == [], "nobody has asked for another"
        assert daemon.metrics()[f"kvtier_worker_live.{gpu.name}"] == 0
        until(lambda: registers_again(session), "a successor")
        session.load(keys, [8, 9])
        assert session.block(9) == stored
        assert gpu_workers(daemon)[0].respawns == 1
        assert daemon.metrics()[f"kvtier_worker_respawns_total.{gpu.name}"] == 1

    def test_a_worker_that_does_not_come_up_is_tried_again(
        self, start: Start, connect_gpu: ConnectGpu, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_CUDA_HANG", SLOWER_START)
        daemon = start()
        daemon.may_complain = True
        session = connect_gpu()
        session.attach()
        session.request_words()
        until(lambda: gpu.workers(), "being started")
        os.kill(gpu.workers()[0], signal.SIGKILL)
        error = session.side.receive()[0].error
        assert error.reason == types_pb2.REASON_WORKER_UNAVAILABLE
        assert "SIGKILL" in error.message
        until(lambda: registers_again(session), "the next one")


@pytest.mark.faults
class TestEngineDeath:
    """Whenever an engine goes, nothing of it stays mapped, and nobody waits for it."""

    def test_while_a_worker_is_started_for_it(
        self, start: Start, connect_gpu: ConnectGpu, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_CUDA_HANG", SLOW_START)
        daemon = start(workers__gpu_idle_s=0.5)
        session = connect_gpu()
        session.attach()
        session.request_words()
        until(lambda: gpu.workers(), "being started")
        session.close()
        until(lambda: daemon.descriptors_of_clients() == 0, "the front has let go")
        until(lambda: not gpu_workers(daemon), "it came up, and nobody used it")
        assert '"copy worker live"' in daemon.log()
        assert not daemon.status().instances
        connect_gpu().ready()

    def test_while_another_waits_for_the_same_worker(
        self, start: Start, connect_gpu: ConnectGpu, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_CUDA_HANG", SLOW_START)
        start()
        first, second = connect_gpu(), connect_gpu()
        first.attach()
        second.attach(instance="second")
        first.request_words()
        second.request_words()
        until(lambda: gpu.workers(), "being started")
        first.close()
        answer, [pidfd] = second.side.receive()
        os.close(pidfd)
        assert answer.words_registered.worker_pid == gpu.workers()[0]
        second.register_memory()

    @pytest.mark.parametrize("kind", ["words", "chunks", "memory", "memory in chunks"])
    def test_while_it_registers(
        self, daemon: Daemon, connect_gpu: ConnectGpu, gpu: FakeGpu, kind: str
    ) -> None:
        other = connect_gpu().ready(instance="other")
        imports = gpu.imports()
        session = connect_gpu()
        session.attach()
        _, fds = gpu.chunks(3)
        request = side_pb2.SideRequest(id=99)
        given: list[int] = []
        if kind != "words":
            session.register_words()
        if kind == "memory in chunks":
            session.add_chunks(fds)
            request.register_memory.CopyFrom(session.chunk_places(3))
        elif kind == "memory":
            request.register_memory.CopyFrom(session.gpu_places())
        elif kind == "chunks":
            session.add_chunks(fds[:1])
            given = fds[1:]
            request.add_chunks.bytes.extend([gpu.granularity] * 2)
        os.kill(other.worker_pid, signal.SIGSTOP)
        try:
            if kind == "words":
                session.request_words()
            else:
                session.side.send(request.SerializeToString(), given)
            time.sleep(0.2)
            session.close()
            # The core knows of no mapping before its words are mapped.
            left = 1 if kind == "words" else 2
            until(lambda: len(daemon.status().instances) == left, "the front has let go")
        finally:
            os.kill(other.worker_pid, signal.SIGCONT)
        until(lambda: len(daemon.status().instances) == 1 and gpu.imports() == imports, "unmapped")
        until(lambda: maps_of_clients(other.worker_pid) == 1, "only the other's words are mapped")
        for fd in fds:
            os.close(fd)
        other.fill(1)
        assert other.store(hashes(1), [0]).state == DONE
        assert gpu_workers(daemon)[0].pid == other.worker_pid, "by the same worker"

    def test_while_the_driver_hangs_on_its_memory(
        self, daemon: Daemon, connect_gpu: ConnectGpu, fake: FakeCuda, gpu: FakeGpu
    ) -> None:
        other = connect_gpu().ready(instance="other")
        imports = gpu.imports()
        session = connect_gpu()
        session.attach()
        session.register_words()
        fake.hang("cuIpcOpenMemHandle_v2", 1, other.worker_pid, pause_ms=2_000)
        request = side_pb2.SideRequest(id=99, register_memory=session.gpu_places())
        session.side.send(request.SerializeToString())
        time.sleep(0.3)
        session.close()
        until(lambda: len(daemon.status().instances) == 1 and gpu.imports() == imports, "unmapped")
        assert gpu_workers(daemon)[0].pid == other.worker_pid

    @pytest.mark.parametrize("moment", ["words", "chunks", "memory"])
    def test_killed(
        self, daemon: Daemon, gpu: FakeGpu, fake: FakeCuda, socket_dir: Path, moment: str
    ) -> None:
        engine = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.daemon.gpu_victim", str(socket_dir), moment],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "registered\n"
            assert gpu.imports() == {"words": 0, "chunks": 3, "memory": 4}[moment]
        finally:
            engine.kill()
            engine.communicate(timeout=DEADLINE_S)
        until(lambda: gpu.imports() == 0 and not daemon.status().instances, "all of it is released")
        assert fake.hbm_used() == 0
        assert gpu_workers(daemon)[0].mapped_bytes == 0
