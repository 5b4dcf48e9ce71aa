"""Everything wrong that a client can say of a GPU and its memory: refused, and nothing is left mapped."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier.v1 import side_pb2, types_pb2

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.gpu import ConnectGpu, FakeGpu, GpuSession, gpu_workers
from tests.integration.daemon.looks import nothing_changes, refusal
from tests.integration.daemon.raw import RawSession, Refused, SideSocket, hashes, memfd
from tests.support.fake_cuda import FakeCuda
from tests.support.process import DEADLINE_S, Daemon, until

pytestmark = pytest.mark.fake_gpu

UNKNOWN = "GPU-0000beef-1111-2222-3333-444444444444"

EXPORTER = """
import sys
from kvtier_kernels import cuda
driver = cuda.load()
driver.retain_primary(0).make_current()
memory = driver.alloc(int(sys.argv[1]))
print(driver.ipc_export(memory).hex(), driver.pointer_info(memory).buffer_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon(start: Start, gpu: FakeGpu) -> Daemon:
    return start()


@pytest.fixture
def attached(daemon: Daemon, connect_gpu: ConnectGpu) -> GpuSession:
    """Its words are registered for the GPU, its memory is not."""
    session = connect_gpu()
    session.attach()
    session.register_words()
    return session


def works(session: GpuSession) -> None:
    """What is registered is of use."""
    session.fill(3)
    assert session.store(hashes(2, seed=3), [0, 1]).state == types_pb2.TRANSFER_STATE_DONE


class TestMemory:
    def test_ranges_that_do_not_fit(self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu) -> None:
        good = attached.gpu_places()
        size = good.mapping_bytes
        cases: list[tuple[Callable[[Any], Any], str, str]] = [
            (lambda r: setattr(r, "mapping_bytes", size - 1), "MAPPING_INVALID", "mapping_bytes"),
            (lambda r: setattr(r.ranges[0], "bytes", 0), "DEVICE_MEMORY_INVALID", "ranges[0].bytes"),
            (lambda r: setattr(r.ranges[0], "bytes", size + 1), "MAPPING_INVALID", "mapping_bytes"),
            (lambda r: r.ranges[0].ClearField("source"), "DEVICE_MEMORY_INVALID", "ranges[0].source"),
            (lambda r: setattr(r.ranges[0].chunks, "count", 0), "DEVICE_MEMORY_INVALID", "ranges[0].source"),
            (
                lambda r: setattr(r.ranges[0].chunks, "count", 1),
                "DEVICE_MEMORY_INVALID",
                "ranges[0].chunks.count",
            ),
            (
                lambda r: setattr(r.ranges[0].ipc, "handle", b"short"),
                "DEVICE_MEMORY_INVALID",
                "ranges[0].ipc.handle",
            ),
            (
                lambda r: setattr(r.ranges[0].ipc, "handle", os.urandom(64)),
                "IMPORT_REFUSED",
                "ranges[0].handle",
            ),
            (lambda r: setattr(r.ranges[0].ipc, "offset", 1), "DEVICE_MEMORY_INVALID", "ranges[0].offset"),
            (
                lambda r: setattr(r.ranges[0].ipc, "offset", 2**62),
                "DEVICE_MEMORY_INVALID",
                "ranges[0].offset",
            ),
            (
                lambda r: setattr(r.ranges[0].ipc, "offset", 2**64 - 1),
                "DEVICE_MEMORY_INVALID",
                "ranges[0].bytes",
            ),
            (_doubled, "DEVICE_MEMORY_INVALID", "ranges[0].offset"),
            (
                lambda r: setattr(r.groups[0].planes[1], "block_stride_bytes", 1 << 30),
                "PLANE_BEYOND_MAPPING",
                "groups[0].planes[1].base_offset",
            ),
            (
                lambda r: setattr(r.groups[0].planes[1], "block_stride_bytes", 2**63),
                "STRIDE_OVERFLOW",
                "groups[0].planes[1].block_stride_bytes",
            ),
        ]  # fmt: skip
        for change, reason, field in cases:
            request = side_pb2.RegisterMemory.FromString(good.SerializeToString())
            change(request)
            with nothing_changes(daemon), refusal(reason, field):
                attached.register(request)
            assert gpu.imports() == 0, field
        attached.register(good)
        works(attached)

    def test_a_plane_across_two_ranges(self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu) -> None:
        request = attached.gpu_places()
        request.ranges.append(request.ranges[0])
        first, second = request.ranges
        first.bytes = 4096 * 40
        second.bytes -= first.bytes
        second.ipc.offset = first.bytes
        with nothing_changes(daemon), refusal("PLANE_BEYOND_MAPPING", "groups[0].planes[1].base_offset"):
            attached.register(request)
        first.bytes, second.bytes, second.ipc.offset = 4096 * 32, 8192 * 32, 4096 * 32
        attached.register(request)
        assert gpu.imports() == 1, "one allocation, opened twice, is one mapping"
        works(attached)

    def test_host_memory_for_a_gpu_and_a_gpus_for_the_host(
        self, daemon: Daemon, attached: GpuSession, connect: Connect, gpu: FakeGpu
    ) -> None:
        request = attached.gpu_places()
        fd = memfd(request.mapping_bytes)
        with nothing_changes(daemon), refusal("MALFORMED", "descriptors"):
            attached.side.call([fd], register_memory=request)
        with nothing_changes(daemon), refusal("DEVICE_MEMORY_INVALID", "ranges"):
            attached.side.call([fd], register_memory=attached.places())
        on_cpu = connect()
        on_cpu.attach(instance="on the CPU")
        on_cpu.register_words()
        with nothing_changes(daemon), refusal("DEVICE_MEMORY_INVALID", "ranges"):
            on_cpu.side.call(register_memory=request)
        reading, writing = os.pipe()
        with nothing_changes(daemon), refusal("DEVICE_MEMORY_INVALID", "device"):
            on_cpu.side.call([reading], add_chunks=side_pb2.AddChunks(bytes=[gpu.granularity]))
        for descriptor in (fd, reading, writing):
            os.close(descriptor)
        on_cpu.register_memory()
        attached.register(request)
        assert daemon.descriptors_of_clients() == 0
        works(attached)

    def test_registering_twice(self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu) -> None:
        attached.register_memory()
        memory, fds = gpu.chunks(1)
        with nothing_changes(daemon), refusal("ALREADY_REGISTERED"):
            attached.register_memory()
        with nothing_changes(daemon), refusal("ALREADY_REGISTERED"):
            attached.register_words()
        with nothing_changes(daemon), refusal("ALREADY_REGISTERED"):
            attached.add_chunks(fds)
        os.close(fds[0])
        assert gpu.imports() == 1
        assert memory.size_bytes == gpu.granularity

    def test_a_handle_of_a_dead_process(self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu) -> None:
        request = attached.places()
        command = [sys.executable, "-c", EXPORTER, str(request.mapping_bytes)]
        exporter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert exporter.stdout is not None
            handle, buffer_id = exporter.stdout.readline().split()
        finally:
            exporter.kill()
            exporter.communicate(timeout=DEADLINE_S)
        source = side_pb2.CudaIpc(handle=bytes.fromhex(handle), buffer_id=int(buffer_id))
        request.ranges.append(side_pb2.DeviceRange(bytes=request.mapping_bytes, ipc=source))
        with nothing_changes(daemon), refusal("IMPORT_REFUSED", "ranges[0].handle"):
            attached.register(request)
        assert gpu.imports() == 0
        attached.register_memory()
        works(attached)

    def test_a_handle_that_came_back_while_the_old_memory_is_open(
        self, daemon: Daemon, attached: GpuSession, connect_gpu: ConnectGpu
    ) -> None:
        request = attached.gpu_places()
        attached.register(request)
        other = connect_gpu()
        other.attach(instance="other")
        other.register_words()
        request.ranges[0].ipc.buffer_id += 1
        with nothing_changes(daemon), refusal("WORKER_UNAVAILABLE", "ranges[0].buffer_id"):
            other.register(request)
        attached.close()
        until(lambda: _registers(other, request), "the old one has been let go of")

    def test_memory_of_another_gpu(
        self, daemon: Daemon, attached: GpuSession, fake: FakeCuda, gpu: FakeGpu
    ) -> None:
        request = attached.places()
        elsewhere = FakeGpu(fake, ordinal=1)
        memory = elsewhere.allocate(request.mapping_bytes)
        request.ranges.append(elsewhere.ipc_range(memory))
        gpu.context.make_current()
        with nothing_changes(daemon), refusal("DEVICE_MEMORY_INVALID"):
            attached.register(request)
        assert gpu.imports() == 0
        attached.register_memory()
        works(attached)


def _doubled(request: side_pb2.RegisterMemory) -> None:
    """Twice what the allocation has."""
    request.mapping_bytes *= 2
    request.ranges[0].bytes *= 2


def _registers(session: GpuSession, request: side_pb2.RegisterMemory) -> bool:
    try:
        return bool(session.register(request))
    except Refused as refused:
        if refused.reason != "WORKER_UNAVAILABLE":
            raise
        return False


class TestChunks:
    def test_they_are_used_up_by_one_registration(
        self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu
    ) -> None:
        memory, fds = gpu.chunks(4)
        assert attached.add_chunks(fds[:1]) == 1
        assert attached.add_chunks(fds[1:]) == 4
        for fd in fds:
            os.close(fd)
        for wrong in (1, 3, 5):
            with nothing_changes(daemon), refusal("DEVICE_MEMORY_INVALID"):
                attached.register(attached.chunk_places(wrong))
        with nothing_changes(daemon), refusal("DEVICE_MEMORY_INVALID", "ranges"):
            attached.register(attached.gpu_places())
        offset = 12_345
        attached.register(attached.chunk_places(4, offset))
        attached.memory = memory.array[offset:]
        works(attached)
        until(lambda: gpu.imports() == 4, "each chunk once")
        attached.close()
        until(lambda: gpu.imports() == 0, "unmapped")

    def test_what_is_no_chunk(self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu) -> None:
        size = gpu.granularity
        memory, fds = gpu.chunks(2)
        reading, writing = os.pipe()
        host = memfd(size)
        cases: list[tuple[list[int], list[int], str, str]] = [
            ([reading], [size], "DEVICE_MEMORY_INVALID", "chunks"),
            ([host], [size], "DEVICE_MEMORY_INVALID", "chunks"),
            ([fds[0], writing], [size, size], "DEVICE_MEMORY_INVALID", "chunks"),
            ([fds[0]], [size - 1], "DEVICE_MEMORY_INVALID", "bytes"),
            ([fds[0]], [0], "DEVICE_MEMORY_INVALID", "bytes[0]"),
            ([fds[0]], [2**63], "DEVICE_MEMORY_INVALID", "bytes[0]"),
            ([fds[0]], [size, size], "COUNT_MISMATCH", "bytes"),
            (fds, [size], "COUNT_MISMATCH", "bytes"),
            ([], [], "COUNT_MISMATCH", "bytes"),
        ]
        for given, sizes, reason, field in cases:
            with nothing_changes(daemon), refusal(reason, field):
                attached.add_chunks(given, sizes)
            assert gpu.imports() == 0, f"{reason} {field}"
        assert attached.add_chunks(fds) == 2, "none of the others was added"
        attached.register(attached.chunk_places(2))
        attached.memory = memory.array
        works(attached)
        for fd in (*fds, reading, writing, host):
            os.close(fd)

    def test_chunks_larger_than_they_are(self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu) -> None:
        _, fds = gpu.chunks(1)
        attached.add_chunks(fds, [2 * gpu.granularity])  # only mapping them shows how large they are
        request = attached.places()
        request.mapping_bytes = 2 * gpu.granularity
        source = side_pb2.CudaChunks(count=1)
        request.ranges.append(side_pb2.DeviceRange(bytes=request.mapping_bytes, chunks=source))
        with nothing_changes(daemon), refusal("DEVICE_MEMORY_INVALID", "ranges[0].chunks"):
            attached.register(request)
        os.close(fds[0])
        attached.close()
        until(lambda: gpu.imports() == 0 and not daemon.status().instances, "nothing is left of it")

    def test_chunks_before_the_words(self, daemon: Daemon, connect_gpu: ConnectGpu, gpu: FakeGpu) -> None:
        session = connect_gpu()
        session.attach()
        _, fds = gpu.chunks(1)
        with nothing_changes(daemon), refusal("NOT_ATTACHED"):
            session.add_chunks(fds)
        os.close(fds[0])

    def test_more_than_fit_one_packet(self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu) -> None:
        _, fds = gpu.chunks(1)
        assert attached.add_chunks(fds * 64) == 64
        sizes = side_pb2.AddChunks(bytes=[gpu.granularity] * 65)
        with pytest.raises(ConnectionError):
            attached.side.call(fds * 65, add_chunks=sizes)
        os.close(fds[0])
        assert attached.attached.goodbye() == "EPOCH_ENDED"
        until(lambda: gpu.imports() == 0, "what it had added is gone with it")

    def test_many_descriptors_that_wait_close_the_connection(
        self, daemon: Daemon, attached: GpuSession, gpu: FakeGpu, socket_dir: Path
    ) -> None:
        _, fds = gpu.chunks(1)
        request = side_pb2.AddChunks(bytes=[gpu.granularity] * 40)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for number in range(4):
                packet = side_pb2.SideRequest(id=number + 1, add_chunks=request).SerializeToString()
                attached.side.send(packet, fds * 40)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        os.close(fds[0])
        assert attached.attached.goodbye() == "QUEUE_FULL"
        until(lambda: gpu.imports() == 0, "nothing is left of it")
        other = SideSocket(socket_dir / "kvtierd.side.sock")
        other.open()
        other.close()


class TestDevice:
    """Words that name a device which cannot serve them."""

    def refused(self, daemon: Daemon, session: RawSession, device: str, reason: str) -> str:
        """The message. Nothing of the attempt stays, and the session may go on with another device."""
        daemon.may_complain = True
        session.device = device
        with nothing_changes(daemon):
            with pytest.raises(Refused) as refused:
                session.register_words()
            until(lambda: not gpu_workers(daemon), "its worker is gone")
        assert refused.value.reason == reason, refused.value
        assert refused.value.error.field == "device"
        assert daemon.descriptors_of_clients() == 0
        return refused.value.error.message

    def said(self, daemon: Daemon, device: str) -> list[str]:
        """Lines of the log that complain about a device."""
        return [line for line in daemon.complaints() if device in line]

    @pytest.mark.parametrize("device", ["0", "cuda:0", UNKNOWN.upper(), UNKNOWN + "0", "x" * 10_000])
    def test_what_no_device_is_called(self, daemon: Daemon, connect: Connect, device: str) -> None:
        session = connect()
        session.attach()
        assert "nvidia-smi -L" in self.refused(daemon, session, device, "DEVICE_UNKNOWN")
        assert not daemon.complaints(), "it is the client's affair"
        session.device = "cpu"
        session.register_words()

    def test_a_gpu_that_is_not_there(self, daemon: Daemon, connect: Connect, gpu: FakeGpu) -> None:
        session = connect()
        session.attach()
        for _ in range(3):
            message = self.refused(daemon, session, UNKNOWN, "DEVICE_UNKNOWN")
            assert UNKNOWN in message
            assert "nvidia-smi -L" in message
        [said] = self.said(daemon, UNKNOWN)
        assert '"DEVICE_UNKNOWN"' in said
        session.device = gpu.name
        session.register_words()

    @pytest.mark.parametrize("fake", [{"devices": 0}], indirect=True)
    def test_a_host_without_a_gpu(
        self, fake: FakeCuda, start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        session = _attached(start(), connect)
        with pytest.raises(Refused) as refused:
            session.register_words()
        assert refused.value.reason in ("DEVICE_UNKNOWN", "DEVICE_UNAVAILABLE")

    def test_a_host_without_a_driver(
        self, start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        missing = tmp_path / "libcuda.so.1"
        monkeypatch.setenv("KVTIER_CUDA_LIBRARY", str(missing))
        daemon = start()
        session = _attached(daemon, connect)
        message = self.refused(daemon, session, UNKNOWN, "DEVICE_UNAVAILABLE")
        assert str(missing) in message
        session.device = ""
        session.register_words()
        session.register_memory()
        session.store(hashes(1), [0])

    @pytest.mark.parametrize("fake", [{"hbm": 8 << 20, "context_bytes": 6 << 20}], indirect=True)
    def test_no_memory_left_for_a_context(self, daemon: Daemon, connect: Connect, gpu: FakeGpu) -> None:
        session = connect()
        session.attach()
        message = self.refused(daemon, session, gpu.name, "DEVICE_OUT_OF_MEMORY")
        assert "gpu_memory_utilization" in message
        [said] = self.said(daemon, gpu.name)
        assert '"DEVICE_OUT_OF_MEMORY"' in said
        assert "gpu_memory_utilization" in said
        gpu.context.release()
        session.register_words()
        assert [worker.device for worker in gpu_workers(daemon)] == [gpu.name]

    @pytest.mark.parametrize("fake", [{"context_fail": 46}], indirect=True)
    def test_a_gpu_for_one_process_only(
        self, fake: FakeCuda, start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        daemon = start()
        message = self.refused(daemon, _attached(daemon, connect), fake.device_name(), "DEVICE_UNAVAILABLE")
        assert "nvidia-smi -c DEFAULT" in message
        assert "CUDA_MPS_PIPE_DIRECTORY" in message

    @pytest.mark.parametrize("fake", [{"mig": 1}], indirect=True)
    def test_a_mig_instance(self, daemon: Daemon, connect: Connect, gpu: FakeGpu) -> None:
        session = connect()
        session.attach()
        assert "MIG" in self.refused(daemon, session, gpu.name, "DEVICE_UNKNOWN")

    @pytest.mark.slow
    def test_more_devices_than_any_host_has(
        self, daemon: Daemon, connect_gpu: ConnectGpu, gpu: FakeGpu
    ) -> None:
        daemon.may_complain = True
        crowd = []
        for number in range(65):
            session = connect_gpu()
            session.attach(instance=f"engine {number}")
            session.device = f"GPU-00000000-0000-0000-0000-{number:012x}"
            crowd.append(session)
        for session in crowd:
            session.request_words()
        answers = [session.side.receive()[0] for session in crowd]
        reasons = {types_pb2.Reason.Name(answer.error.reason) for answer in answers}
        assert reasons <= {"REASON_DEVICE_UNKNOWN", "REASON_WORKER_UNAVAILABLE", "REASON_QUEUE_FULL"}
        assert "REASON_DEVICE_UNKNOWN" in reasons
        until(lambda: not gpu_workers(daemon), "all their workers are gone")
        assert not [name for name in daemon.metrics() if "GPU-0000" in name], (
            "no label is a client's to choose"
        )
        crowd[0].device = gpu.name
        crowd[0].register_words()
        crowd[0].register_memory()
        works(crowd[0])


def _attached(daemon: Daemon, connect: Connect) -> RawSession:
    daemon.may_complain = True
    session = connect()
    session.attach()
    session.device = UNKNOWN
    return session
