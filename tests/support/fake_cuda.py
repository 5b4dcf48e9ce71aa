"""A fake `libcuda.so.1` for tests: built from tests/fake_cuda, one fake machine per `FakeCuda`.

It is a test double of the driver: it shows whether bytes, order, ownership and errors are right, between real
processes. Results on it say nothing about the speed of a GPU.

    def test_something(fake_cuda):                      # one fake GPU of 1 GiB
        driver = fake_cuda.driver()                     # in this process
        subprocess.run(..., env=os.environ | fake_cuda.environment)   # and in others

    def test_something_else(make_fake_cuda):
        fake = make_fake_cuda(version=12080, devices=2, hbm=64 << 20, bandwidth=100_000_000)

The names of the settings are those of tests/fake_cuda/settings.h: `hbm=…` is FAKE_CUDA_HBM. A child process
may be given others: `env=environment_of(fake, fail="cuMemAlloc:2:2")`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.leaks import SHM, SHM_PREFIX

if TYPE_CHECKING:
    from kvtier_kernels.cuda import Driver

REPO = Path(__file__).resolve().parents[2]
SOURCES = REPO / "tests" / "fake_cuda"
BUILDS = REPO / "build" / "fake_cuda"
FLAGS = ["-std=c17", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared", "-pthread"]
FLAGS += ["-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
BUILD_S = 120
HANG = -1
KINDS = {1: "legacy", 2: "chunk"}
ROOM = 65_536


def build(sanitizer: str | None = None) -> Path:
    """Returns the library, which is built if its sources have changed. `sanitizer` is "thread" or "address".
    Several processes may ask at the same time."""
    flags = [*FLAGS, *([f"-fsanitize={sanitizer}", "-g"] if sanitizer else [])]
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(" ".join(flags).encode())
    for file in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(file.read_bytes())
    folder = BUILDS / digest.hexdigest()[:16]
    library = folder / "libcuda.so.1"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            half = folder / "half"
            command = ["gcc", *flags, "-o", str(half), *map(str, sources)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
            assert done.returncode == 0, f"the fake driver does not build:\n{done.stderr}"
            half.rename(library)
    return library


@dataclass(frozen=True)
class OpenImport:
    """Device memory of one living process that another has open."""

    importer_pid: int
    exporter_pid: int
    device: int
    kind: str
    """"legacy" (an IPC handle) or "chunk"."""
    size_bytes: int


class _RawImport(ctypes.Structure):
    _fields_ = (
        ("importer_pid", ctypes.c_int32),
        ("exporter_pid", ctypes.c_int32),
        ("device", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("bytes", ctypes.c_uint64),
    )


class FakeCuda:
    """One fake machine: a folder with the library, its settings, the shared state and the device memory."""

    def __init__(self, folder: Path, **settings: object) -> None:
        """`folder` must exist, on a tmpfs. Each machine gets a library of its own, so that one test process
        can have several machines one after another."""
        self.folder = folder
        self.library = folder / "libcuda.so.1"
        shutil.copy(build(), self.library)
        lines = [f"FAKE_CUDA_{name.upper()}={value}\n" for name, value in settings.items()]
        (folder / "settings").write_text("".join(lines))
        self.environment = {"KVTIER_CUDA_LIBRARY": str(self.library), "FAKE_CUDA_DIR": str(folder)}
        """The environment for child processes."""
        self.raw = ctypes.CDLL(str(self.library))
        self.raw.fake_cuda_function.restype = ctypes.c_char_p
        self.raw.fake_cuda_used_bytes.restype = ctypes.c_uint64
        self.raw.fake_cuda_calls.restype = ctypes.c_uint64
        self.raw.fake_cuda_arm.argtypes = [
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.c_int32,
            ctypes.c_uint32,
            ctypes.c_int32,
        ]
        self.raw.fake_cuda_delay.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self.raw.fake_cuda_shut_down.restype = None
        self.raw.fake_cuda_lift.restype = None
        self._closed = False

    def driver(self) -> Driver:
        """Returns the binding on this fake, in this process."""
        from kvtier_kernels.cuda import load

        return load(str(self.library))

    @staticmethod
    def device_name(ordinal: int = 0) -> str:
        """Returns the text name of a device."""
        return f"GPU-fa4e0000-0000-4000-8000-{ordinal:012x}"

    def functions(self) -> list[str]:
        """Returns every driver function that the fake has, by exported name."""
        names: list[str] = []
        while (name := self.raw.fake_cuda_function(len(names))) is not None:
            names.append(name.decode())
        return names

    def hbm_used(self, device: int = 0, contexts: bool = False) -> int:
        """Returns the bytes of device memory that living processes hold, with their contexts if asked."""
        return int(self.raw.fake_cuda_used_bytes(device, int(contexts)))

    def open_imports(self) -> list[OpenImport]:
        """Returns what living processes have open of each other's memory."""
        found = (_RawImport * ROOM)()
        count = self.raw.fake_cuda_open_imports(found, ROOM)
        return [
            OpenImport(one.importer_pid, one.exporter_pid, one.device, KINDS[one.kind], one.bytes)
            for one in (found[index] for index in range(count))
        ]

    def processes(self) -> list[int]:
        """Returns the pids of living processes that have called the driver."""
        found = (ctypes.c_int32 * ROOM)()
        return list(found[: self.raw.fake_cuda_processes(found, ROOM)])

    def calls(self, function: str, pid: int = 0) -> int:
        """Returns how often a process (0: all of them, including dead ones) has called the function."""
        return int(self.raw.fake_cuda_calls(function.encode(), pid))

    def arm(self, function: str, n: int, code: int, pid: int) -> None:
        """Makes the n-th call of the function from now on (0: every one) in that process fail with the code.
        Codes of lost contexts stick."""
        self._arm(function, n, code, 0, pid)

    def hang(self, function: str, n: int, pid: int, pause_ms: int = 0) -> None:
        """Makes that call hang, for so long or (0) until `lift`."""
        self._arm(function, n, HANG, pause_ms, pid)

    def _arm(self, function: str, n: int, code: int, pause_ms: int, pid: int) -> None:
        failed = self.raw.fake_cuda_arm(function.encode(), n, code, pause_ms, pid)
        assert not failed, f"cannot arm {function} in process {pid}, which may not use the driver"

    def lift(self, pid: int) -> None:
        """Disarms all faults of that process; what hangs goes on."""
        self.raw.fake_cuda_lift(pid)

    def refusals(self) -> list[str]:
        """Returns one line for each call that was refused, by any process: "pid function code why"."""
        path = self.folder / "refusals"
        return path.read_text().splitlines() if path.exists() else []

    def delay(self, stream: int, seconds: float) -> None:
        """Makes the stream of this process rest so long, as if a forward pass ran. Its context must be
        current."""
        code = self.raw.fake_cuda_delay(stream, round(seconds * 1e6))
        assert code == 0, f"fake_cuda_delay: {code}"

    @staticmethod
    def view(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns device memory of this process, as the device sees it. The view dangles when the memory is
        freed."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def close(self) -> None:
        """Ends what this process has of the machine, and removes the folder. Children must be gone. Nothing
        of its device memory may be touched any more."""
        if not self._closed:
            self._closed = True
            self.raw.fake_cuda_shut_down()
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def make_fake_cuda() -> Iterator[Callable[..., FakeCuda]]:
    """Makes fake machines, as `make_fake_cuda(version=12080, …)`, which are closed when the test ends."""
    made: list[FakeCuda] = []

    def make(**settings: object) -> FakeCuda:
        made.append(FakeCuda(Path(tempfile.mkdtemp(prefix=f"{SHM_PREFIX}cuda-", dir=SHM)), **settings))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture
def fake_cuda(make_fake_cuda: Callable[..., FakeCuda]) -> FakeCuda:
    """One fake GPU of 1 GiB, driver 13.0."""
    return make_fake_cuda()


def environment_of(fake: FakeCuda, **settings: object) -> dict[str, str]:
    """Returns the whole environment of a child that uses the fake, with settings of its own."""
    own = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    return os.environ | fake.environment | own
