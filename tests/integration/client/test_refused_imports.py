"""A driver that does not let the daemon open an engine's memory, as between some containers: the daemon says
why, tries a worker with another PID where that may help, and the engine can go on with a mirror."""

from __future__ import annotations

import pytest
from kvtier import Client, KvtierError, Namespace, Reason
from kvtier.cuda import MirrorMemory

from tests.integration.client.conftest import MakeGpu
from tests.integration.daemon.commands import kvtierctl
from tests.support.daemon import DaemonHost, until
from tests.support.engine_gpu import EngineGpu
from tests.support.fake_cuda import make_fake_cuda
from tests.support.gpu_client import GpuCache, options, ready
from tests.support.plain_client import READY_S, TRANSFER_S, block_hashes

__all__ = ["make_fake_cuda"]
pytestmark = pytest.mark.fake_gpu

HASHES = block_hashes("refused", range(8))
IDS = range(len(HASHES))
NAMESPACE, SHOWN_PID = "FAKE_CUDA_PID_NAMESPACE", "FAKE_CUDA_SHOWN_PID"
"""What the fake driver lets a process pretend."""
ANSWERS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    205: "CUDA_ERROR_MAP_FAILED",
    400: "CUDA_ERROR_INVALID_HANDLE",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}
"""With which a driver may refuse to open a handle."""


@pytest.fixture
def gpu(make_gpu: MakeGpu) -> EngineGpu:
    return make_gpu()


@pytest.fixture
def host(gpu: EngineGpu, idle_host: DaemonHost) -> DaemonHost:
    """A running daemon on the same machine."""
    idle_host.start()
    return idle_host


@pytest.fixture
def cache(gpu: EngineGpu) -> GpuCache:
    return GpuCache(gpu)


def refused(client: Client) -> KvtierError:
    """Waits until the client is told that the daemon may not open its memory."""
    until(
        lambda: client.memory_error is not None and client.memory_error.reason is Reason.IMPORT_REFUSED,
        "the client knows that its memory cannot be opened",
    )
    assert client.memory_error is not None
    return client.memory_error


def gpu_worker(host: DaemonHost) -> int:
    """The PID of the GPU's worker that is live; 0 if there is none."""
    pids = [each.pid for each in host.status().workers if each.device != "cpu" and each.state == "live"]
    return pids[0] if pids else 0


def stores_and_loads(client: Client, cache: GpuCache) -> None:
    """The daemon copies to and from the GPU's memory itself, and every byte is right."""
    for index, value in enumerate(HASHES):
        cache.fill(index, value)
    assert client.store(HASHES, IDS).wait(TRANSFER_S).done
    cache.wipe()
    with client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        assert hit.hits == len(HASHES)
        assert client.load(hit, IDS).wait(TRANSFER_S).done
    cache.check(HASHES)


@pytest.fixture(params=ANSWERS)
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, gpu: EngineGpu) -> int:
    """The driver of daemons that are started from now on answers so."""
    gpu.driver.memory_info()  # this process has read its settings
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"cuIpcOpenMemHandle_v2:*:{request.param}")
    return int(request.param)


def test_whatever_the_driver_says_is_told_everywhere_and_a_mirror_works(
    code: int, gpu: EngineGpu, host: DaemonHost, cache: GpuCache, namespace: Namespace
) -> None:
    name = ANSWERS[code]
    with Client(**options(cache, host.socket, "one", namespace)) as client:
        error = refused(client)
        assert error.value == name
        assert f"({name}, {code})" in error.message
        assert not client.ready
    [found] = host.status().refused_imports
    assert (found.device, found.error, found.count >= 1) == (gpu.fake.device_name(), name, True)
    assert found.why == error.message
    assert host.metrics()[f"kvtier_imports_refused_total.{found.device}.{name}"] >= 1
    page = kvtierctl(host.daemon, "engines").stdout
    assert found.device in page
    assert "mirror" in page
    settings = options(cache, host.socket, "one", namespace)
    with MirrorMemory(cache.memory, [cache.group]) as mirror:
        settings["memory"] = mirror
        with Client(**settings) as client:
            ready(client)
            assert client.memory_error is None
            for index, value in enumerate(HASHES):
                cache.fill(index, value)
            mirror.copy_out(IDS)
            assert client.store(HASHES, IDS).wait(TRANSFER_S).done
            mirror.discard(IDS)
            cache.wipe()
            with client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
                assert hit.hits == len(HASHES)
                mirror.populate(IDS)
                assert client.load(hit, IDS).wait(TRANSFER_S).done
            mirror.copy_in(IDS)
            cache.check(HASHES)
    assert gpu.fake.open_imports() == []


def test_an_engine_with_the_worker_s_own_pid_gets_a_worker_with_another(
    gpu: EngineGpu,
    host: DaemonHost,
    cache: GpuCache,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Client(**options(cache, host.socket, "one", namespace)) as client:
        ready(client)
        pid = gpu_worker(host)
    until(lambda: gpu.fake.open_imports() == [], "the worker has let go")
    monkeypatch.setenv(SHOWN_PID, str(pid))
    with Client(**options(cache, host.socket, "two", namespace)) as client:
        ready(client)
        assert client.memory_error is None
        stores_and_loads(client, cache)
    assert gpu_worker(host) not in (0, pid)
    worker = next(each for each in host.status().workers if each.device != "cpu")
    assert worker.respawns == 0, "nothing was lost"
    [found] = host.status().refused_imports
    assert (found.error, found.count) == ("CUDA_ERROR_INVALID_CONTEXT", 1)


def test_an_engine_of_another_pid_namespace_is_tried_with_one_other_worker_and_no_more(
    gpu: EngineGpu,
    host: DaemonHost,
    cache: GpuCache,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NAMESPACE, "1")
    with Client(**options(cache, host.socket, "one", namespace)) as client:
        assert "PID namespaces" in refused(client).message
        second = gpu_worker(host)
        counted = host.status().refused_imports[0].count
        assert counted >= 2
        until(lambda: host.status().refused_imports[0].count > counted + 1, "it was tried again")
        assert gpu_worker(host) == second
    assert len({line.split()[0] for line in gpu.fake.refusals()}) == 2, "two workers have tried"
    # Once the driver lets it in, the same worker does.
    monkeypatch.delenv(NAMESPACE)
    with Client(**options(cache, host.socket, "one", namespace)) as client:
        ready(client)
        assert gpu_worker(host) == second
        stores_and_loads(client, cache)


def test_the_worker_that_serves_another_engine_stays(
    gpu: EngineGpu,
    host: DaemonHost,
    cache: GpuCache,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Client(**options(cache, host.socket, "served", namespace)) as served:
        ready(served)
        pid, epoch = gpu_worker(host), served.epoch
        monkeypatch.setenv(NAMESPACE, "1")
        with Client(**options(GpuCache(gpu), host.socket, "other", namespace)) as other:
            refused(other)
        assert (gpu_worker(host), served.epoch) == (pid, epoch)
        stores_and_loads(served, cache)


def test_chunks_need_no_handle(
    gpu: EngineGpu, host: DaemonHost, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the daemon's advice says: memory that is shared by descriptors."""
    monkeypatch.setenv(NAMESPACE, "1")
    cache = GpuCache(gpu, chunks=True)
    with Client(**options(cache, host.socket, "one", namespace)) as client:
        ready(client)
        stores_and_loads(client, cache)
    assert not host.status().refused_imports
