"""The first GPU of a fake machine, its context current in the test's thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from kvtier_kernels.cuda import DeviceInfo, Driver

from tests.support.fake_cuda import FakeCuda
from tests.unit.transfer.gpu.exporter import Engine


@dataclass
class Gpu:
    fake: FakeCuda
    driver: Driver
    info: DeviceInfo


@pytest.fixture
def gpu(make_fake_cuda: Callable[..., FakeCuda]) -> Gpu:
    """One of two."""
    fake = make_fake_cuda(hbm=64 << 20, devices=2)
    driver = fake.driver()
    context = driver.retain_primary(0)
    context.push()
    return Gpu(fake, driver, driver.devices()[0])


@pytest.fixture
def engine(gpu: Gpu) -> Iterator[Engine]:
    """A process that has memory of the GPU."""
    engine = Engine(gpu.fake)
    yield engine
    engine.close()
