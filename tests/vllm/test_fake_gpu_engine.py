"""A real vLLM whose KV cache lies in a GPU's memory, played by the fake driver: what it stored before it was
killed comes back over the GPU's copy worker, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost, until
from tests.support.fake_cuda import FakeCuda
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.vllm.conftest import QUICK, STORY_TOKENS, FirstLife
from tests.vllm.engine import REPOSITORY, Engine, EngineOptions
from tests.vllm.rig import BLOCK, Rig, full_blocks, kv_transfer_config, prompt, same, start_rig

pytestmark = [pytest.mark.vllm, pytest.mark.fake_gpu, pytest.mark.timeout(400)]


@dataclass
class Machine:
    """A fake GPU, and a daemon beside it."""

    fake: FakeCuda
    host: DaemonHost
    model: Path

    def options(self, connector: str) -> EngineOptions:
        """Prefills are chunked."""
        config: dict[str, Any] = kv_transfer_config(self.host.socket, load_start_deadline_s=60.0)
        config |= {"kv_connector": connector, "kv_connector_module_path": "tests.vllm.fake_gpu_connector"}
        return EngineOptions(
            self.model,
            kv_transfer_config=config,
            max_num_batched_tokens=256,
            environment=dict(self.fake.environment),
        )

    def restart_worker(self, settings: str) -> None:
        """The GPU's next worker finds these settings of the driver."""
        (self.fake.folder / "settings").write_text(settings)
        for worker in self.host.status().workers:
            if worker.device != "cpu":
                os.kill(worker.pid, signal.SIGKILL)
        until(lambda: len(self.host.status().workers) == 1, "the worker is gone")

    def wait_gone(self) -> None:
        """Until nothing of any engine is left, on the GPU neither."""
        until(lambda: not self.host.status().instances, "the daemon noticed the engine's death")
        until(lambda: self.fake.open_imports() == [], "the daemon has let go of its memory")
        assert self.fake.hbm_used() == 0


@pytest.fixture(scope="module")
def machine(model: Path) -> Iterator[Machine]:
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    fake = FakeCuda(Path(tempfile.mkdtemp(prefix=f"{SHM_PREFIX}cuda-", dir=SHM)))
    host = DaemonHost(run, pool / "pool", pool__size="130MiB", **QUICK)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fake.environment.items():
            patch.setenv(name, value)
        host.start()
    yield Machine(fake, host, model)
    host.stop()
    fake.close()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture(scope="module")
def first_life(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> FirstLife:
    """An engine that computed the story's prompt, and was killed with -9."""
    engine = Engine.start(machine.options("FakeGpuConnector"), tmp_path_factory.mktemp("first") / "log")
    try:
        rig = Rig(machine.host, engine)
        rig.patient()
        rig.wait_ready()
        assert [found.exporter_pid for found in machine.fake.open_imports()] == [engine.pid]
        cold = rig.generate(prompt(STORY_TOKENS))
        hit = rig.generate(prompt(STORY_TOKENS))
        rig.wait_stored()
    finally:
        engine.kill()
    machine.wait_gone()
    return FirstLife(cold, hit)


@pytest.mark.parametrize(
    ("connector", "way", "seed"),
    [
        ("FakeGpuConnector", "exported", 1),
        pytest.param("ChunkedGpuConnector", "exported in chunks", 2, marks=pytest.mark.long),
        pytest.param("PrivateGpuConnector", "mirrored", 3, marks=pytest.mark.long),
    ],
    ids=["exported", "exported in chunks", "mirrored"],
)
def test_a_second_engine_continues_where_a_killed_one_was(
    first_life: FirstLife,
    machine: Machine,
    connector: str,
    way: str,
    seed: int,
    tmp_path: Path,
    proved: Callable[[str], None],
) -> None:
    rig = start_rig(machine.host, machine.options(connector), tmp_path / "log")
    with rig.engine:
        restored = rig.generate(prompt(STORY_TOKENS))
        assert restored.num_cached_tokens == first_life.hit.num_cached_tokens == full_blocks(STORY_TOKENS)
        assert same(restored, first_life.hit)
        # And the other way round: what this one stores it gets back.
        tokens = prompt(10 * BLOCK + 1, seed=seed)
        hit = rig.compute_and_hit(tokens)
        rig.forget()
        again = rig.generate(tokens)
        assert again.num_cached_tokens == hit.num_cached_tokens == 10 * BLOCK
        assert same(again, hit)
    machine.wait_gone()
    proved(
        f"On a GPU (fake driver) an engine whose KV cache was {way} got {restored.num_cached_tokens} tokens "
        "of a killed engine back, bit for bit."
    )


@pytest.mark.faults
@pytest.mark.parametrize(
    "moment", [pytest.param("while it starts", marks=pytest.mark.long), "while it computes"]
)
def test_a_killed_engine_leaves_nothing_on_the_gpu(machine: Machine, moment: str, tmp_path: Path) -> None:
    engine = Engine.launch(machine.options("FakeGpuConnector"), tmp_path / "log")
    try:
        if moment == "while it starts":
            until(lambda: machine.fake.hbm_used() > 0, "the KV cache is allocated")
        else:
            engine.wait_ready()
            rig = Rig(machine.host, engine)
            rig.wait_ready()
            stored = machine.host.status().counters.stored_blocks
            engine.send(
                "generate",
                prompts=[prompt(600, seed=70 + index) for index in range(6)],
                max_tokens=200,
                logprobs=1,
                engine_timeout_s=60,
            )
            until(lambda: machine.host.status().counters.stored_blocks > stored, "blocks are stored")
    finally:
        engine.kill()
    machine.wait_gone()
    assert machine.host.status().state == "serving"


@pytest.mark.slow
@pytest.mark.long
def test_scheduler_and_worker_in_processes_of_their_own(machine: Machine, tmp_path: Path) -> None:
    tokens = prompt(11 * BLOCK + 5, seed=80)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.vllm.separate_processes"),
                json.dumps(machine.options("FakeGpuConnector").llm_arguments()),
                json.dumps(tokens),
            ],
            cwd=REPOSITORY,
            env=os.environ | environment | machine.fake.environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        line, _ = process.communicate(timeout=300)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of it ended before
    assert line, (tmp_path / "log").read_text()[-4000:]
    results = json.loads(line)
    assert [results[name]["cached"] for name in ("cold", "hit", "restored")] == [0, 11 * BLOCK, 11 * BLOCK]
    assert results["restored"]["tokens"] == results["hit"]["tokens"]
    assert results["restored"]["logprobs"] == results["hit"]["logprobs"]
    machine.wait_gone()


@pytest.mark.parametrize(
    "code",
    [201, pytest.param(205, marks=pytest.mark.long), pytest.param(400, marks=pytest.mark.long)],
)
def test_an_engine_whose_memory_the_daemon_may_not_open_continues_with_a_mirror(
    first_life: FirstLife, machine: Machine, code: int, tmp_path: Path
) -> None:
    """As in a container with a PID namespace of its own, on a driver that minds."""
    machine.restart_worker(f"FAKE_CUDA_IPC_NAMESPACES={code}\n")
    options = machine.options("FakeGpuConnector")
    options.environment["FAKE_CUDA_PID_NAMESPACE"] = "1"
    rig = Rig(machine.host, Engine.start(options, tmp_path / "log"))
    with rig.engine:
        rig.patient()
        until(lambda: machine.host.status().refused_imports, "the driver has refused")
        rig.generate(prompt(BLOCK, seed=code))  # the engine notices in its next step
        rig.wait_ready()
        assert machine.fake.open_imports() == []
        restored = rig.generate(prompt(STORY_TOKENS))
        assert restored.num_cached_tokens == first_life.hit.num_cached_tokens == full_blocks(STORY_TOKENS)
        assert same(restored, first_life.hit)
        tokens = prompt(10 * BLOCK + 1, seed=code + 1)
        hit = rig.compute_and_hit(tokens)
        rig.forget()
        again = rig.generate(tokens)
        assert again.num_cached_tokens == hit.num_cached_tokens == 10 * BLOCK
        assert same(again, hit)
    machine.wait_gone()
    assert "mirror in host memory" in (tmp_path / "log").read_text()
