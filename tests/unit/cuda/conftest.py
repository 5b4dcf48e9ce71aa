"""A GPU of the fake driver, by driver version, with its context current in the test's thread.

The fake refuses what the driver refuses, so these tests show that the binding asks for the right things in
the right order. That both have read cuda.h rightly, and not only alike, is what test_abi.py is for.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from kvtier_kernels.cuda import Context, DeviceInfo, Driver
from numpy.typing import NDArray

from tests.support.fake_cuda import FakeCuda, environment_of, fake_cuda, make_fake_cuda

__all__ = ["fake_cuda", "make_fake_cuda"]

VERSIONS = (13000, 12080, 12040)
HBM_BYTES = 64 << 20
IMPORTS = """
import faulthandler, sys
faulthandler.dump_traceback_later(40, exit=True)
from kvtier_kernels.cuda import *
"""


class Gpu:
    """The first GPU of a fake machine, as this process uses it."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.driver: Driver = fake.driver()
        self.device: DeviceInfo = self.driver.devices()[0]
        self.context: Context = self.driver.retain_primary(self.device.ordinal)

    def fail(self, function: str, code: int, n: int = 1) -> None:
        """The n-th call from now on (0: every one) in this process fails."""
        self.fake.arm(function, n, code, os.getpid())

    def calls(self, function: str) -> int:
        """How often this process has called it."""
        return self.fake.calls(function, os.getpid())

    def child(self, program: str, *arguments: object, pass_fds: tuple[int, ...] = ()) -> str:
        """Runs a program in another process of this machine: what it prints. It finds `driver` and `context`,
        which is current."""
        prologue = "driver = load()\ncontext = driver.retain_primary(0)\ncontext.make_current()\n"
        return self._run(prologue + program, arguments, pass_fds, {})

    def child_without_driver(self, program: str, **environment: object) -> str:
        """The same without driver and context."""
        return self._run(program, (), (), environment)

    def _run(
        self,
        program: str,
        arguments: tuple[object, ...],
        fds: tuple[int, ...],
        environment: dict[str, object],
    ) -> str:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS + program, *map(str, arguments)],
            env=environment_of(self.fake, **environment),
            pass_fds=fds,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    """The CUDA version that the driver supports."""
    return int(request.param)


@pytest.fixture
def gpu(make_fake_cuda: Callable[..., FakeCuda]) -> Iterator[Gpu]:
    """On the newest driver."""
    with in_use(make_fake_cuda(hbm=HBM_BYTES)) as gpu:
        yield gpu


@pytest.fixture
def gpu_of_version(make_fake_cuda: Callable[..., FakeCuda], version: int) -> Iterator[Gpu]:
    with in_use(make_fake_cuda(hbm=HBM_BYTES, version=version)) as gpu:
        yield gpu


@contextmanager
def in_use(fake: FakeCuda) -> Iterator[Gpu]:
    """The machine's first GPU, its context current; the machine outlives it."""
    gpu = Gpu(fake)
    gpu.context.push()
    yield gpu
    # What a test has broken may stay so: its machine ends with it.


def random_bytes(n: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)
