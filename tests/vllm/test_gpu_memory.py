"""What the connector asks of an engine on a GPU, and where its KV cache lies there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.connector import KvtierConnector
from kvtier_vllm.worker.gpu import CudaGpu, GpuKVMemory, engine_gpu, refuse_sleep_mode, required_layout
from kvtier_vllm.worker.kv_memory import NotShareable
from kvtier_vllm.worker.layout import describe

from tests.support.fake_cuda import FakeCuda
from tests.vllm.fake_gpu import FakeEngineGpu, kv_cache_on, tensor_at
from tests.vllm.kv_memory import BLOCKS, LAYERS, PAGE_BYTES, allocate, config

pytestmark = [pytest.mark.vllm, pytest.mark.fake_gpu]


def platform(kind: str) -> Any:
    """As vLLM's `current_platform`."""
    return SimpleNamespace(is_cpu=lambda: kind == "cpu", is_cuda=lambda: kind == "cuda", device_name=kind)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", platform("cuda"))


@pytest.fixture
def gpu(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeEngineGpu:
    for name, value in fake_cuda.environment.items():
        monkeypatch.setenv(name, value)
    return FakeEngineGpu()


def engine(**extra: object) -> Any:
    """A configuration as vLLM asks a connector's class with."""
    transfer = SimpleNamespace(
        kv_connector="KvtierConnector",
        kv_connector_module_path="kvtier_vllm.connector",
        kv_connector_extra_config=extra,
    )
    return SimpleNamespace(kv_transfer_config=transfer, cache_config=SimpleNamespace(kv_cache_layout=None))


# --- what is asked of the engine


def test_the_device_is_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", platform("cpu"))
    assert engine_gpu() is None
    monkeypatch.setattr("vllm.platforms.current_platform", platform("cuda"))
    assert isinstance(engine_gpu(), CudaGpu)
    monkeypatch.setattr("vllm.platforms.current_platform", platform("xpu"))
    with pytest.raises(NotShareable, match=r"'xpu'.*CPUs and NVIDIA GPUs"):
        engine_gpu()


@pytest.mark.usefixtures("on_cuda")
def test_contiguous_blocks_are_asked_for_only_if_wanted() -> None:
    assert required_layout(ConnectorConfig(), (0, 32)) is None
    assert required_layout(ConnectorConfig(contiguous_blocks=True), (0, 32)) == "BLHNC"
    assert required_layout(ConnectorConfig(contiguous_blocks=True), (0, 31)) is None
    assert KvtierConnector.get_required_kvcache_layout(engine()) is None
    assert KvtierConnector.get_required_kvcache_layout(engine(contiguous_blocks="yes")) is None


def test_contiguous_blocks_are_never_asked_of_a_cpu() -> None:
    assert required_layout(ConnectorConfig(contiguous_blocks=True), (0, 32)) is None


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("supported", "resolved"),
    [(["LBNHC", "LBHNC", "BLHNC"], "BLHNC"), (["LBNHC", "LBHNC"], "LBNHC")],
    ids=["the kernels know it", "the kernels do not"],
)
def test_vllm_takes_the_wish_for_contiguous_blocks_as_a_wish(supported: list[str], resolved: str) -> None:
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    layout = resolve_kv_cache_layout(engine(contiguous_blocks=True), [supported])
    assert layout.name == resolved


def test_sleep_mode_needs_a_vllm_that_tells_of_it() -> None:
    asleep = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    awake = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
    with pytest.raises(NotShareable, match=r"0\.32.*--enable-sleep-mode off, or use vLLM 0\.33"):
        refuse_sleep_mode(asleep, (0, 32))
    refuse_sleep_mode(asleep, (0, 33))
    refuse_sleep_mode(awake, (0, 32))
    assert KvtierConnector.supports_sleep_mode(None) is True


# --- where the KV cache lies


@pytest.mark.parametrize(("layout", "across_layers"), [("LBHNC", False), ("BLHNC", True)])
def test_planes_lead_to_every_block_of_every_layer(
    gpu: FakeEngineGpu, layout: str, across_layers: bool
) -> None:
    kv_cache_config = config(across_layers)
    with kv_cache_on(gpu) as made:
        caches = allocate(kv_cache_config, layout)
    memory = GpuKVMemory(caches)
    assert memory.size_bytes == BLOCKS * LAYERS * PAGE_BYTES
    [found] = describe(caches, kv_cache_config, memory)
    [(address, _)] = made
    for number, (layer, plane) in enumerate(found.planes.items()):
        for block in range(BLOCKS):
            caches[layer][block] = number * BLOCKS + block + 1
            start = plane.base_offset + block * plane.block_stride_bytes
            fragment = tensor_at(address + start, plane.fragment_bytes).view(caches[layer].dtype)
            assert fragment.unique().tolist() == [number * BLOCKS + block + 1]


def test_several_allocations_are_one_run_of_offsets(gpu: FakeEngineGpu) -> None:
    with kv_cache_on(gpu):
        first, second = allocate(config(False), "LBHNC"), allocate(config(False), "LBHNC")
    names = list(first)
    mixed = {names[0]: first[names[0]], names[1]: second[names[1]], names[2]: first[names[2]]}
    memory = GpuKVMemory(mixed)
    whole = BLOCKS * LAYERS * PAGE_BYTES
    assert memory.size_bytes == 2 * whole
    assert memory.device_memory.range_bytes == (whole, whole)
    layer = BLOCKS * PAGE_BYTES
    planes = describe(mixed, config(False), memory)[0].planes
    assert [plane.base_offset for plane in planes.values()] == [0, whole + layer, 2 * layer]
    with pytest.raises(NotShareable, match="lies outside"):
        GpuKVMemory(first).offset_of("elsewhere", second[names[0]])


def test_a_cache_in_host_memory_is_not_taken_for_the_gpus(gpu: FakeEngineGpu) -> None:
    with pytest.raises(NotShareable, match=r"not on one GPU.*no memory of a GPU"):
        GpuKVMemory(allocate(config(False), "LBHNC"))


def test_a_machine_without_a_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    with pytest.raises(NotShareable, match=r"/nowhere/libcuda\.so"):
        GpuKVMemory(allocate(config(False), "LBHNC"))
