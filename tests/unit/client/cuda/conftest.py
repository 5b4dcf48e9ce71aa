"""An engine's GPU behind the fake driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.engine_gpu import EngineGpu
from tests.support.fake_cuda import FakeCuda, fake_cuda, make_fake_cuda

__all__ = ["fake_cuda", "make_fake_cuda"]

MakeGpu = Callable[..., EngineGpu]


@pytest.fixture
def make_gpu(make_fake_cuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGpu]:
    """A fake machine with these settings, which is the one that this process's driver is."""
    made: list[EngineGpu] = []

    def make(**settings: object) -> EngineGpu:
        fake = make_fake_cuda(**settings)
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        made.append(EngineGpu(fake))
        return made[-1]

    yield make
    for gpu in made:
        gpu.driver.library.result("cuCtxSetCurrent", 0)


@pytest.fixture
def gpu(make_gpu: MakeGpu) -> EngineGpu:
    return make_gpu()
