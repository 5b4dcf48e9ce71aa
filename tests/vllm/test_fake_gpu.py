"""vLLM's scheduler and the connector on a GPU, played by the fake driver: the engine's work lies on a stream
and is done later, its KV cache is imported by the GPU's copy worker or mirrored; every byte is checked."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvtier import PartState, Reason

from tests.support.daemon import DaemonHost, until
from tests.support.fake_cuda import FakeCuda
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.length import repeats, rounds
from tests.vllm import fake_gpu_connector
from tests.vllm.conftest import QUICK
from tests.vllm.fake_gpu import FakeEngineGpu, Gate, LaggingEngine
from tests.vllm.hybrid_engine import FULL, STATE, WINDOW, HybridEngine, Kind
from tests.vllm.mini_engine import MiniEngine, WrongKV, engine_config, output_of
from tests.vllm.mini_rig import Chaos, all_came_back, client, step_until, wait_ready, wait_stored
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.fake_gpu, pytest.mark.timeout(300)]

BLOCKS = 48
LAG_S = 0.01
SEEDS = range(rounds(2, 20))
WAYS = {
    "exported": ("FakeGpuConnector", "export"),
    "exported in chunks": ("ChunkedGpuConnector", "export"),
    "mirrored": ("PrivateGpuConnector", "auto"),
}


@dataclass
class Machine:
    """One fake GPU, and a daemon beside it."""

    fake: FakeCuda
    host: DaemonHost
    gpu: FakeEngineGpu
    model: Path
    engines: list[MiniEngine]
    patience: dict[str, Any]

    def engine(self, way: str = "exported", **extra: Any) -> LaggingEngine:
        """Attached to the daemon."""
        engine = self.start(*WAYS[way], **extra)
        wait_ready(engine)
        return engine

    def start(
        self,
        connector: str,
        share: str,
        lag_s: float = LAG_S,
        lag: Callable[[int], None] | None = None,
        **extra: Any,
    ) -> LaggingEngine:
        """In a namespace of its own unless `salt` says otherwise. `lag`: what its streams do instead of
        resting for `lag_s`."""
        options = self.patience | {"salt": f"engine {len(self.engines)}", "share": share} | extra
        config = kv_transfer_config(self.host.socket, **options)
        config |= {"kv_connector": connector, "kv_connector_module_path": "tests.vllm.fake_gpu_connector"}
        lag = lag or (lambda stream: self.fake.delay(stream, lag_s))
        engine = LaggingEngine(engine_config(self.model, config), BLOCKS, self.gpu, lag)
        self.engines.append(engine)
        return engine

    def hybrid(self, way: str, kinds: Sequence[Kind]) -> HybridEngine:
        """With several KV cache groups; its steps are done when they return."""
        connector, share = WAYS[way]
        options = self.patience | {"salt": f"engine {len(self.engines)}", "share": share}
        config = kv_transfer_config(self.host.socket, **options)
        config |= {"kv_connector": connector, "kv_connector_module_path": "tests.vllm.fake_gpu_connector"}
        engine = HybridEngine(self.model, config, kinds, BLOCKS)
        self.engines.append(engine)
        wait_ready(engine)
        return engine


@pytest.fixture
def machine(request: pytest.FixtureRequest, model: Path, patience: dict[str, Any]) -> Iterator[Machine]:
    """`@pytest.mark.parametrize("machine", [{"version": 12080}], indirect=True)` chooses the driver."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    folder = Path(tempfile.mkdtemp(prefix=f"{SHM_PREFIX}cuda-", dir=SHM))
    fake = FakeCuda(folder, **getattr(request, "param", {}))
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    for name, value in fake.environment.items():
        patch.setenv(name, value)
    host = DaemonHost(run, pool / "pool", pool__size="6MiB", **QUICK)
    host.start()
    gpu = FakeEngineGpu()
    patch.setattr(fake_gpu_connector, "_gpu", gpu)
    machine = Machine(fake, host, gpu, model, [], patience)
    yield machine
    host.thaw()
    for engine in machine.engines:
        engine.close()
    host.stop()
    fake.close()
    patch.undo()
    shutil.rmtree(run)
    shutil.rmtree(pool)


DRIVERS = {
    "13.0": {"version": 13000},
    "12.8": {"version": 12080},
    "without batches": {"version": 12040},
    "streams write no words": {"memops": "none"},
}
every_way = pytest.mark.parametrize("way", WAYS)
every_way_with_every_driver = pytest.mark.parametrize(
    ("way", "machine"),
    [
        # `make test` has each way once, and each driver once.
        pytest.param(
            way,
            driver,
            id=f"{way}-{name}",
            marks=[pytest.mark.long] * (way != "exported" and name != "13.0"),
        )
        for way in WAYS
        for name, driver in DRIVERS.items()
    ],
    indirect=["machine"],
)


def store_forget_load(engine: MiniEngine) -> None:
    """One prompt, computed, forgotten, loaded."""
    engine.add("first", prompt(100, seed=3))
    engine.run()
    wait_stored(engine)
    engine.forget()
    engine.add("second", prompt(100, seed=3))
    engine.run()
    assert (engine.cached["first"], engine.cached["second"]) == (0, 96)
    assert engine.finished["second"] == engine.finished["first"] == output_of(prompt(100, seed=3), 8)
    all_came_back(engine)


@pytest.mark.parametrize(
    ("kinds", "way"),
    [
        pytest.param((FULL, WINDOW, WINDOW), "exported", id="windows-exported"),
        pytest.param(
            (FULL, WINDOW, WINDOW),
            "exported in chunks",
            id="windows-exported in chunks",
            marks=pytest.mark.long,
        ),
        pytest.param((FULL, WINDOW, WINDOW), "mirrored", id="windows-mirrored"),
        pytest.param((FULL, STATE), "exported", id="states-exported", marks=pytest.mark.long),
        pytest.param((FULL, STATE), "exported in chunks", id="states-exported in chunks"),
        pytest.param((FULL, STATE), "mirrored", id="states-mirrored", marks=pytest.mark.long),
    ],
)
def test_groups_that_lie_over_each_other_in_a_gpus_memory(
    machine: Machine, way: str, kinds: Sequence[Kind]
) -> None:
    store_forget_load(machine.hybrid(way, kinds))


@every_way_with_every_driver
def test_what_a_gpu_forgot_is_loaded(machine: Machine, way: str) -> None:
    store_forget_load(machine.engine(way))


@pytest.mark.faults
@pytest.mark.parametrize("machine", [{"bandwidth": 8_000_000}], indirect=True, ids=["slow link"])
@pytest.mark.parametrize("seed", repeats(SEEDS))
@every_way
def test_disorder_costs_no_byte_no_block_and_no_request(machine: Machine, way: str, seed: int) -> None:
    engine = machine.engine(way, lag_s=0.001, salt="disorder", load_start_deadline_s=0.3)
    chaos = Chaos(engine, machine.host, seed)
    chaos.go_on(60)
    chaos.end()
    assert chaos.loaded


def test_engines_share_blocks_whichever_way_their_memory_goes(machine: Machine) -> None:
    engines = [machine.engine(way, salt="shared") for way in WAYS]
    engines[0].add("mine", prompt(100))
    engines[0].run()
    wait_stored(engines[0])
    for engine in engines[1:]:
        engine.add("yours", prompt(100))
        engine.run()
        assert engine.cached["yours"] == 96


@pytest.mark.parametrize("hook", ["let_load", "let_store"])
def test_doorbells_rung_by_the_processor_would_come_too_early(
    machine: Machine, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of every test above: where the engine's work is late, and the daemon does not wait
    for it, that shows."""
    gate = Gate(machine.fake, machine.gpu)
    engine = machine.engine(lag=gate.wait)
    sharing = engine.worker._worker._sharing

    def at_once(rank: Any, step: int, parts: Any) -> None:
        rank.ring(0 if hook == "let_load" else 1, step)

    monkeypatch.setattr(sharing, hook, at_once)
    engine.add("first", prompt(100, seed=3))
    if hook == "let_store":
        gate.shut()
        step_until(engine, lambda: client(engine).status.counters.stores, "the store begins")
        wait_stored(engine)  # while what is stored is still to be computed
        gate.open()
    engine.run()
    wait_stored(engine)
    engine.forget()
    engine.add("second", prompt(100, seed=3))
    if hook == "let_load":
        gate.shut()
        step_until(engine, lambda: client(engine).status.counters.loads, "the load begins")
        wait_stored(engine)  # while its blocks are still to be zeroed
        gate.open()
    with pytest.raises(WrongKV):
        engine.run()


def test_a_killed_daemon_is_found_again(machine: Machine) -> None:
    engine = machine.engine()
    engine.add("before", prompt(100))
    engine.run()
    wait_stored(engine)
    machine.host.restart()
    wait_ready(engine, machine.host)
    engine.forget()
    engine.add("after", prompt(100))
    engine.run()
    assert engine.cached["after"] == 96


def test_no_import_is_left_open(machine: Machine) -> None:
    engine = machine.engine()
    store_forget_load(engine)
    assert [found.exporter_pid for found in machine.fake.open_imports()] == [os.getpid()]
    machine.engines.remove(engine)
    engine.close()
    until(lambda: machine.fake.open_imports() == [], "the daemon has let go of the KV cache")


# --- what cannot be exported


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """`told("mirror")`: warnings of the connector that contain it."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return lambda word: [record.getMessage() for record in caplog.records if word in record.getMessage()]


def test_memory_that_the_allocator_keeps_private_is_mirrored_with_one_warning(
    machine: Machine, told: Callable[[str], list[str]]
) -> None:
    engine = machine.engine("mirrored")
    [warning] = told("mirror")
    assert "allocated for no handles" in warning
    store_forget_load(engine)
    assert machine.fake.open_imports() == []
    memory = engine.worker._worker._sharing.client_memory
    until(lambda: memory.held_bytes == 0, "the mirror is empty when nothing is on its way")


def test_a_user_may_insist_on_export(machine: Machine, told: Callable[[str], list[str]]) -> None:
    engine = machine.start("PrivateGpuConnector", "export")
    [warning] = told("kvtier is off")
    assert "allocated for no handles" in warning
    assert '"share": "mirror"' in warning
    engine.add("computed", prompt(100))
    engine.run()
    assert engine.finished["computed"] == output_of(prompt(100), 8)


@pytest.mark.parametrize(
    ("machine", "word"),
    [({"mig": 1}, "MIG"), ({"no_ipc": 1}, "cuIpcGetMemHandle")],
    indirect=["machine"],
    ids=["MIG", "no permission"],
)
def test_what_the_machine_forbids_is_mirrored_with_one_warning(
    machine: Machine, word: str, told: Callable[[str], list[str]]
) -> None:
    mirrored = machine.start("FakeGpuConnector", "auto")
    [warning] = told("mirror in host memory")
    assert word in warning
    wait_ready(mirrored)
    store_forget_load(mirrored)
    insisting = machine.start("FakeGpuConnector", "export")
    [warning] = told("kvtier is off")
    assert word in warning
    insisting.add("computed", prompt(100))
    insisting.run()
    assert insisting.finished["computed"] == output_of(prompt(100), 8)


@pytest.mark.parametrize("share", ["auto", pytest.param("export", marks=pytest.mark.long)])
def test_memory_that_the_daemon_may_not_open_is_mirrored_from_the_next_step_on(
    share: str, machine: Machine, told: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has made handles for it, and refuses to open them in the daemon's process."""
    monkeypatch.setenv("FAKE_CUDA_PID_NAMESPACE", "1")
    engine = machine.start("FakeGpuConnector", share)
    until(lambda: machine.host.status().refused_imports, "the driver has refused")

    def has_heard() -> bool:
        # Before this, it may have heard that the worker is gone, because another one is tried.
        error = engine.worker._worker.link.client.memory_error
        return error is not None and error.reason is Reason.IMPORT_REFUSED

    until(has_heard, "the engine has heard of it")
    engine.add("notices", prompt(100))
    engine.run()
    assert engine.finished["notices"] == output_of(prompt(100), 8)
    if share == "export":
        assert told("mirror in host memory") == []
        monkeypatch.delenv("FAKE_CUDA_PID_NAMESPACE")
    else:
        [warning] = told("mirror in host memory")
        assert "PID namespaces" in warning
    wait_ready(engine)
    store_forget_load(engine)
    assert len(machine.fake.open_imports()) == (share == "export")


@pytest.mark.parametrize("failing", ["copy_out", "copy_in"])
def test_a_mirror_that_cannot_copy_costs_misses_only(
    machine: Machine, failing: str, monkeypatch: pytest.MonkeyPatch, told: Callable[[str], list[str]]
) -> None:
    engine = machine.engine("mirrored")
    memory = engine.worker._worker._sharing.client_memory
    if failing == "copy_in":
        engine.add("first", prompt(100))
        engine.run()
        wait_stored(engine)
        engine.forget()

    # Which driver call fails first is the driver's business: all of them do.
    machine.fake.arm("cuMemcpyBatchAsync_v2", 0, 2, os.getpid())
    engine.add("while it fails", prompt(100))
    engine.run()
    assert engine.finished["while it fails"] == output_of(prompt(100), 8)
    assert len(told("its mirror failed")) == 1
    machine.fake.lift(os.getpid())
    all_came_back(engine)
    engine.forget()
    assert machine.host.status().counters.stored_blocks == (6 if failing == "copy_in" else 0)
    until(lambda: engine.connector._scheduler._storer.has_room, "stores are submitted again")
    engine.add("afterwards", prompt(120, seed=9))
    engine.run()
    wait_stored(engine)
    engine.forget()
    engine.add("again", prompt(120, seed=9))
    engine.run()
    assert engine.cached["again"] == 112
    until(lambda: memory.held_bytes == 0, "the mirror is empty when nothing is on its way")


def test_a_mirror_that_falls_behind_gives_stores_up_and_computes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits without bound: a full line is no reason to hold an engine up."""
    engine = machine.engine("mirrored")
    monkeypatch.setattr(engine.worker._worker._sharing._copier, "_jobs_max", 0)
    engine.add("computed", prompt(100))
    engine.run()
    assert engine.finished["computed"] == output_of(prompt(100), 8)
    all_came_back(engine)
    monkeypatch.undo()
    until(lambda: engine.connector._scheduler._storer.has_room, "stores are submitted again")
    engine.forget()
    store_forget_load(engine)


# --- sleep


def remap(machine: Machine, address: int, size_bytes: int) -> None:
    """Other memory at the same addresses, as an engine has when it wakes."""
    driver = machine.gpu.driver
    exportable = bool(driver.pointer_info(address).allowed_handle_types)
    while size_bytes:
        chunk = driver.pointer_info(address)
        driver.unmap(chunk.base, chunk.size)
        handle = driver.chunk_create(chunk.size, 0, exportable=exportable)
        driver.map_chunk(chunk.base, chunk.size, handle)
        driver.chunk_release(handle)
        driver.allow_access(chunk.base, chunk.size, 0)
        address, size_bytes = address + chunk.size, max(0, size_bytes - chunk.size)


@pytest.mark.parametrize("way", ["exported in chunks", "mirrored"])
def test_an_engine_that_slept_has_other_memory(machine: Machine, way: str) -> None:
    """In the order of vLLM 0.33: unregister, suspend, resume, restore."""
    engine = machine.engine(way)
    engine.add("before", prompt(100))
    engine.run()
    wait_stored(engine)
    assert engine.scheduler.reset_prefix_cache()
    machine.gpu.synchronize()
    engine.worker.unregister_kv_caches()
    assert machine.fake.open_imports() == []
    start = min(pages.ctypes.data for pages in engine.pages)
    remap(machine, start, sum(pages.nbytes for pages in engine.pages))
    engine.worker.restore_kv_caches()
    wait_ready(engine)
    engine.add("awake", prompt(100))
    engine.run()
    assert engine.cached["awake"] == 96
    assert engine.finished["awake"] == engine.finished["before"]
    engine.forget()
    store_forget_load(engine)


@pytest.mark.parametrize("way", ["exported in chunks", "mirrored"])
def test_what_was_loaded_into_memory_that_is_gone_is_computed(machine: Machine, way: str) -> None:
    """The engine falls asleep when a load has landed, and nobody has reported it yet."""
    engine = machine.engine(way, lag_s=0.1)
    engine.add("before", prompt(100))
    engine.run()
    wait_stored(engine)
    engine.forget()
    engine.add("loading", prompt(100))
    rank = engine.worker._worker
    machine.host.freeze_workers()  # it must not land before it is seen

    def loads() -> list[Any]:
        engine.step()
        return list(rank._loads)

    until(loads, "a load is under way")
    [load] = rank._loads
    machine.host.thaw()
    until(lambda: load.left[0].state() is PartState.DONE, "it has landed")
    machine.gpu.synchronize()
    engine.worker.unregister_kv_caches()
    start = min(pages.ctypes.data for pages in engine.pages)
    remap(machine, start, sum(pages.nbytes for pages in engine.pages))
    engine.worker.restore_kv_caches()
    wait_ready(engine)
    engine.run()
    assert engine.finished["loading"] == engine.finished["before"]
    all_came_back(engine)


@every_way
def test_an_engine_that_sleeps_has_its_memory_back(machine: Machine, way: str) -> None:
    engine = machine.engine(way)
    engine.add("before", prompt(100))
    engine.run()
    wait_stored(engine)
    for _ in range(2):  # vLLM may call it twice
        engine.worker.unregister_kv_caches()
    assert machine.fake.open_imports() == []
    engine.add("asleep", [*prompt(100), 1])
    engine.run()
    assert engine.finished["asleep"] == output_of([*prompt(100), 1], 8)
    for _ in range(2):
        engine.worker.restore_kv_caches()
    wait_ready(engine)
    engine.forget()
    engine.add("awake", prompt(100))
    engine.run()
    assert engine.cached["awake"] == 96
    all_came_back(engine)


def test_an_engine_wakes_up_even_if_the_daemon_slept_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, told: Callable[[str], list[str]]
) -> None:
    monkeypatch.setattr("kvtier_vllm.worker.side.SLEEP_TIMEOUT_S", 0.2)
    engine = machine.engine()
    engine.add("before", prompt(100))
    engine.run()
    wait_stored(engine)
    epoch = client(engine).status.epoch
    machine.host.freeze(workers=True)
    engine.worker.unregister_kv_caches()
    assert len(told("still held")) == 1
    engine.worker.restore_kv_caches()
    machine.host.thaw()
    # The worker's new client may be welcome in the epoch that ends because of its old one.
    until(lambda: client(engine).status.epoch not in (None, epoch), "the engine is attached anew")
    wait_ready(engine)
    engine.forget()
    engine.add("awake", prompt(100))
    engine.run()
    assert engine.cached["awake"] == 96
    all_came_back(engine)


def test_an_engine_that_falls_asleep_before_it_is_attached_registers_when_it_wakes(machine: Machine) -> None:
    machine.host.stop()
    engine = machine.start("FakeGpuConnector", "export", salt="early")
    engine.worker.unregister_kv_caches()
    machine.host.start()
    engine.run()
    assert machine.fake.open_imports() == []
    engine.worker.restore_kv_caches()
    wait_ready(engine)
    store_forget_load(engine)
