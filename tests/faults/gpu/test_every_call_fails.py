"""Every call that a copy worker makes of the driver: failing, with the context lost as well, and hanging.

Which calls there are is read from a worker that works. Then each function fails once, at its first call or at
a later one, in a worker that an engine registers with, stores to, loads from and leaves. Whatever fails, the
same engine is served in the end, what was reported done is in place, nothing is written after its fence,
nothing stays mapped, and the next engine finds everything as if nothing had been.
"""

import contextlib
import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import pytest
from kvtier import Client, ClientState

from tests.faults.gpu.devices import CHUNK_BYTES, Device, ended, ready
from tests.integration.daemon.conftest import Start
from tests.support.fake_cuda import FakeCuda
from tests.support.length import rounds
from tests.support.plain_client import block_hashes
from tests.support.process import Daemon, until

pytestmark = [pytest.mark.faults, pytest.mark.fake_gpu, pytest.mark.timeout(600)]

DEVICES = 6
N = 8
"""Blocks of a store."""
PASSING, LOST = 304, 719
"""CUDA_ERROR_OPERATING_SYSTEM and CUDA_ERROR_LAUNCH_FAILED."""
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
ROUNDS = rounds(24, 200)
LATENCY_S, SETTLE_S = 0.003, 0.02
"""Of each operation on a stream; and how long after its fence a copy is still looked for."""
REFUSED = "cannot be registered"
DEADLINE_S = 60.0
ATTEMPTS = 5


@dataclass(frozen=True)
class Fault:
    """The n-th call of a function from then on, and only that."""

    function: str
    n: int
    code: int


Result = TypeVar("Result")
Case = tuple[Fault, ...]
"""What fails together. Mostly one thing."""


class Rig:
    """A fake machine with a daemon and several GPUs, the memory of an engine on each."""

    def __init__(self, fake: FakeCuda, daemon: Daemon) -> None:
        self.fake, self.daemon = fake, daemon
        daemon.may_complain = True
        self.devices = [Device(fake, daemon, ordinal) for ordinal in range(DEVICES)]
        self._names = itertools.count()
        self._engines_own_pid = os.getpid()

    def hashes(self) -> list[bytes]:
        """Of blocks that nobody has stored."""
        return block_hashes(f"round {next(self._names)}", range(N))

    def good_round(self, device: Device) -> None:
        """An engine comes, stores, loads, goes: all of it works."""
        hashes = self.hashes()
        with device.engine(self.daemon.socket) as client:
            ready(client)
            device.fill(0, hashes)
            assert ended(client.store(hashes, range(N)).wait(DEADLINE_S)).done
            device.wipe()
            with client.lookup(hashes, lease=True, timeout_s=DEADLINE_S) as found:
                assert found.hits == N
                assert ended(client.load(found, range(N, 2 * N)).wait(DEADLINE_S)).done
            device.check(N, hashes)
        device.until_let_go()

    def hard_round(self, device: Device) -> None:
        """The same while something fails: it may take several attempts, none of which ends undefined."""
        hashes = self.hashes()
        client = device.engine(self.daemon.socket)
        with client:
            self._until_stored(client, device, hashes)
            self._until_loaded(client, device, hashes)
            device.wipe()
            assert client.close(DEADLINE_S)
        device.until_let_go()
        device.check(0, [])

    def _until_stored(self, client: Client, device: Device, hashes: list[bytes]) -> None:
        for _ in range(ATTEMPTS):
            ready(client)
            device.fill(0, hashes)
            if ended(client.store(hashes, range(N)).wait(DEADLINE_S)).done:
                return
            device.wipe()
        pytest.fail(f"{ATTEMPTS} stores failed: {client.status}")

    def _until_loaded(self, client: Client, device: Device, hashes: list[bytes]) -> None:
        for _ in range(ATTEMPTS):
            ready(client)
            device.wipe()
            with client.lookup(hashes, lease=True, timeout_s=DEADLINE_S) as found:
                if not found.hits:
                    continue
                loaded = ended(client.load(found, range(N, N + found.hits)).wait(DEADLINE_S))
            if loaded.done:
                assert found.hits == N, "what was stored stays"
                device.check(N, hashes)
                return
            device.check_outside(N, N)
            device.wipe()
            time.sleep(SETTLE_S)
            device.check(0, [])
        pytest.fail(f"{ATTEMPTS} loads failed: {client.status}")

    # ---- which calls there are

    def calls_of_worker(self, pid: int) -> dict[str, int]:
        """How often a worker has called each function. The one that only tells names cannot fail."""
        functions = self.fake.functions()
        counts = {name: self.fake.calls(name, pid) for name in functions if name != "cuGetErrorName"}
        # The fake counts both forms of a function under the plain name.
        for name in functions:
            if f"{name}_v2" in counts:
                counts[name] -= counts[f"{name}_v2"]
        return {name: count for name, count in counts.items() if count}

    def worker(self, device: Device) -> int:
        """The pid of the live worker, when all of the pool is registered."""
        pid = device.worker_pid()
        assert pid is not None
        return pid

    def find_calls(self, device: Device) -> tuple[dict[str, int], dict[str, int]]:
        """How often a worker calls each function until it is ready, and from then on for one engine."""
        self.good_round(device)
        pid = self.worker(device)
        until(lambda: self._registered(device), "the pool is registered in the background")
        first = self.calls_of_worker(pid)
        self.good_round(device)
        assert self.worker(device) == pid
        second = self.calls_of_worker(pid)
        engines = {name: second[name] - first.get(name, 0) for name in second}
        start = {name: first[name] - engines[name] for name in first}
        return _some(start), _some(engines)

    def _registered(self, device: Device) -> bool:
        [found] = [worker for worker in self.daemon.status().workers if worker.device == device.name]
        return bool(found.registered_bytes)

    # ---- failures

    def fails_while_serving(self, device: Device, case: Case) -> set[str]:
        """In a worker that lives, all of the case. Which functions it has called only because of that."""
        before, after = self.fails_perhaps(device, case)
        for fault in case:
            struck = after.get(fault.function, 0) >= before.get(fault.function, 0) + fault.n
            assert struck, f"{fault} did not come to pass"
        return set(after) - set(before)

    def fails_perhaps(self, device: Device, case: Case) -> tuple[dict[str, int], dict[str, int]]:
        """In a worker that lives, as far as it gets there. Its calls until then, and after."""
        self.good_round(device)
        pid = self.worker(device)
        before = self.calls_of_worker(pid)
        for fault in case:
            self.fake.arm(fault.function, fault.n, fault.code, pid)
        self.hard_round(device)
        after = self.calls_of_worker(pid)
        self.fake.lift(pid)
        self.good_round(device)
        return before, after

    def never_returns(self, device: Device, case: Case) -> None:
        """In a worker that lives: it is killed, and replaced."""
        [fault] = case
        self.good_round(device)
        pid = self.worker(device)
        self.fake.hang(fault.function, fault.n, pid)
        self.hard_round(device)
        assert pid not in self.fake.processes(), f"a worker that {fault} holds up is killed"
        self.good_round(device)

    def fails_at_start(self, device: Device, case: Case) -> None:
        """In a worker that is started."""
        [fault] = case
        until(lambda: device.worker_pid() is None, "the idle worker has ended")
        before = self._workers_calls(fault.function)
        with self.settings(f"FAKE_CUDA_FAIL={fault.function}:{fault.n}:{fault.code}\n"):
            client = device.engine(self.daemon.socket)
            until(lambda: self._workers_calls(fault.function) >= before + fault.n, f"{fault} came to pass")
        with client:
            until(lambda: is_ready(client) or REFUSED in client.status.why, "an answer")
            if why := client.status.why:
                assert fault.function in why or "copy worker" in why
        device.until_let_go()
        self.good_round(device)

    def _workers_calls(self, function: str) -> int:
        return self.fake.calls(function) - self.fake.calls(function, self._engines_own_pid)

    @contextlib.contextmanager
    def settings(self, line: str) -> Iterator[None]:
        """What processes find that call the driver for the first time."""
        path = self.fake.folder / "settings"
        text = path.read_text()
        path.write_text(text + line)
        yield
        path.write_text(text)

    def verify(self) -> None:
        """At the end: nothing is left of anybody, and the daemon ends as it should."""
        until(lambda: not self.daemon.status().instances, "all sessions are over")
        assert self.fake.open_imports() == []
        status = self.daemon.status()
        assert status.counters.integrity_failures == 0
        assert self.daemon.stop() == 0
        assert [pid for pid in self.fake.processes() if pid != os.getpid()] == []


def _some(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > 0}


def is_ready(client: Client) -> bool:
    return client.status.state is ClientState.READY


def cases(counts: dict[str, int]) -> list[Case]:
    """The first call of each function and, where there are several, one in the middle."""
    return [
        (Fault(name, n, code),)
        for name, count in sorted(counts.items())
        for n in sorted({1, count // 2 + 1})
        for code in (PASSING, LOST)
    ]


def in_turns(
    run: Callable[[Device, Case], Result], devices: Sequence[Device], todo: Sequence[Case]
) -> dict[Case, Result]:
    """Runs cases, one at a time on each device: what each has returned."""
    queue, failed = deque(todo), threading.Event()
    results: dict[Case, Result] = {}

    def serve(device: Device) -> None:
        while not failed.is_set():
            try:
                case = queue.popleft()
            except IndexError:
                return
            try:
                results[case] = run(device, case)
            except BaseException as error:
                failed.set()
                error.add_note(f"while this failed on {device.name}: {case}")
                raise

    with ThreadPoolExecutor(len(devices)) as pool:
        for done in [pool.submit(serve, device) for device in devices]:
            done.result()
    return results


@pytest.fixture
def rig(
    start: Start,
    make_fake_cuda: Callable[..., FakeCuda],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Rig]:
    given = {"fake": {}, "daemon": {}} | getattr(request, "param", {})
    fake = make_fake_cuda(
        devices=DEVICES,
        granularity=CHUNK_BYTES,
        hbm=256 << 20,
        latency_us=round(LATENCY_S * 1e6),
        **given["fake"],
    )
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    rig = Rig(fake, start(**given["daemon"]))
    yield rig
    rig.verify()


def test_while_an_engine_is_served(rig: Rig, proved: Callable[[str], None]) -> None:
    _, counts = rig.find_calls(rig.devices[0])
    called = in_turns(rig.fails_while_serving, rig.devices, cases(counts))
    # What is called only when something else has failed, fails as well.
    worse = [
        (*case, Fault(function, 1, code))
        for case, more in called.items()
        for function in sorted(more)
        for code in (PASSING, LOST)
    ]
    assert "cuStreamSynchronize" in set().union(*called.values()), "a copy that was submitted in part"
    in_turns(rig.fails_while_serving, rig.devices, worse)
    proved(
        f"each of {len(counts)} functions of the driver that serve an engine has failed, in "
        f"{len(called) + len(worse)} ways: always a defined end, no wrong byte, no import left open"
    )


# After a copy that hung, auto would go on without batches.
@pytest.mark.parametrize(
    "rig", [{"daemon": {"workers__copy_deadline_s": 4, "workers__gpu_copy_method": "batch"}}], indirect=True
)
def test_calls_that_never_return(rig: Rig, proved: Callable[[str], None]) -> None:
    _, counts = rig.find_calls(rig.devices[0])
    todo: list[Case] = [(Fault(function, 1, 0),) for function in sorted(counts)]
    in_turns(rig.never_returns, rig.devices, todo)
    proved(f"each of {len(todo)} functions of the driver that serve an engine has hung for ever")


def test_several_at_once(rig: Rig) -> None:
    """What goes back when something has failed can fail as well."""
    print(f"KVTIER_SEED={SEED}")
    chance = random.Random(SEED)
    _, counts = rig.find_calls(rig.devices[0])
    calls = sorted((name, n) for name, count in counts.items() for n in range(1, 2 * count + 1))
    todo = [
        tuple(Fault(*call, chance.choices((PASSING, LOST), (4, 1))[0]) for call in chance.sample(calls, 4))
        for _ in range(ROUNDS)
    ]
    in_turns(rig.fails_perhaps, rig.devices, todo)


@pytest.mark.parametrize("rig", [{"daemon": {"workers__gpu_idle_s": 3}}], indirect=True)
@pytest.mark.long
def test_while_a_worker_starts(rig: Rig, proved: Callable[[str], None]) -> None:
    counts, _ = rig.find_calls(rig.devices[0])
    todo = cases(counts)
    for device, case in zip(itertools.cycle(rig.devices), todo, strict=False):
        rig.fails_at_start(device, case)
    proved(
        f"each of {len(counts)} functions of the driver that start a worker has failed, in {len(todo)} ways"
    )


@pytest.mark.parametrize(
    "rig",
    [
        {"fake": {"version": 12080}},
        {"fake": {"version": 12040}},
        {"daemon": {"workers__gpu_copy_method": "rows"}},
    ],
    ids=["batch-12.8", "loop", "rows"],
    indirect=True,
)
def test_while_copying_by_another_method(rig: Rig) -> None:
    _, counts = rig.find_calls(rig.devices[0])
    copies = {name: count for name, count in counts.items() if "Memcpy" in name}
    assert copies
    in_turns(rig.fails_while_serving, rig.devices, cases(copies))


def test_a_pool_that_cannot_be_registered_fails_parts_until_it_can(rig: Rig) -> None:
    device, hashes = rig.devices[0], rig.hashes()
    with (
        rig.settings(f"FAKE_CUDA_FAIL=cuMemHostRegister_v2:*:{PASSING}\n"),
        device.engine(rig.daemon.socket) as engine,
    ):
        ready(engine)
        device.fill(0, hashes)
        outcome = ended(engine.store(hashes, range(N)).wait(DEADLINE_S))
        assert outcome.error is not None
        assert "cuMemHostRegister_v2" in rig.daemon.log()
        rig.fake.lift(rig.worker(device))
        assert ended(engine.store(hashes, range(N)).wait(DEADLINE_S)).done
        device.wipe()
        with engine.lookup(hashes, lease=True, timeout_s=DEADLINE_S) as found:
            assert ended(engine.load(found, range(N)).wait(DEADLINE_S)).done
        device.check(0, hashes)
    device.until_let_go()
