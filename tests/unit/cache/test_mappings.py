"""What a session may add before it registers. The copy worker here says yes to everything."""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kvtierd.cache.mappings import CHUNKS_MAX, Mappings
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SessionId, WorkerId

SESSION = SessionId(1)
GPU = "GPU-0000beef-0000-0000-0000-000000000001"


class Workers:
    """As far as `Mappings` knows the supervisor and its orders."""

    def __init__(self) -> None:
        self.workers = {WorkerId(1): SimpleNamespace(pid=os.getpid())}
        self.orders = self.lives = self
        self.refuse: Refusal | None = None
        self.renewable = False

    def renew(self, worker: WorkerId) -> bool:
        return self.renewable

    async def worker_for(self, device: str) -> WorkerId:
        return WorkerId(1)

    async def map_words(self, *arguments: object) -> None:
        """Done."""

    async def map_memory(self, *arguments: object) -> None:
        if self.refuse:
            raise self.refuse

    async def add_chunks(
        self, worker: WorkerId, session: SessionId, fds: Sequence[int], sizes: Sequence[int]
    ) -> None:
        if self.refuse:
            raise self.refuse

    def pidfd_for(self, worker: WorkerId) -> int:
        return -1


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def mappings(workers: Workers) -> Mappings:
    supervisor: Any = workers
    return Mappings(lambda stimulus: None, supervisor)


async def test_chunks_are_counted_up_to_a_bound(mappings: Mappings) -> None:
    await mappings.register_words(SESSION, GPU, 0, 1, 1)
    for number in range(CHUNKS_MAX // 64):
        assert await mappings.add_chunks(SESSION, [], [4096] * 64) == 64 * (number + 1)
    with pytest.raises(Refusal) as refusal:
        await mappings.add_chunks(SESSION, [], [4096])
    assert (refusal.value.reason, refusal.value.field) == (Reason.DEVICE_MEMORY_INVALID, "bytes")
    device, sizes = mappings.expected(SESSION)
    assert (device, len(sizes)) == (GPU, CHUNKS_MAX)


async def test_what_was_refused_changes_no_count(mappings: Mappings, workers: Workers) -> None:
    await mappings.register_words(SESSION, GPU, 0, 1, 1)
    await mappings.add_chunks(SESSION, [], [4096, 8192])
    workers.refuse = Refusal(Reason.DEVICE_MEMORY_INVALID, "no")
    with pytest.raises(Refusal):
        await mappings.add_chunks(SESSION, [], [4096])
    with pytest.raises(Refusal):
        await mappings.register_memory(SESSION, None, 1, [])
    assert mappings.expected(SESSION) == (GPU, (4096, 8192))
    workers.refuse = None
    await mappings.register_memory(SESSION, None, 1, [])
    with pytest.raises(Refusal) as refusal:
        mappings.expected(SESSION)
    assert refusal.value.reason is Reason.ALREADY_REGISTERED


async def test_a_session_whose_worker_was_lost_begins_anew_and_may_change_its_device(
    mappings: Mappings,
) -> None:
    await mappings.register_words(SESSION, GPU, 0, 1, 1)
    await mappings.add_chunks(SESSION, [], [4096])
    mappings.worker_lost(WorkerId(1))
    with pytest.raises(Refusal) as refusal:
        mappings.expected(SESSION)
    assert refusal.value.reason is Reason.NOT_ATTACHED
    await mappings.register_words(SESSION, "cpu", 0, 1, 1)
    assert mappings.expected(SESSION) == ("cpu", ())


@pytest.mark.parametrize(
    ("reason", "error", "renewable", "told"),
    [
        (Reason.IMPORT_REFUSED, "CUDA_ERROR_INVALID_CONTEXT", True, Reason.WORKER_UNAVAILABLE),
        (Reason.IMPORT_REFUSED, "CUDA_ERROR_INVALID_CONTEXT", False, Reason.IMPORT_REFUSED),
        (Reason.IMPORT_REFUSED, "CUDA_ERROR_MAP_FAILED", True, Reason.IMPORT_REFUSED),
        (Reason.DEVICE_MEMORY_INVALID, "CUDA_ERROR_INVALID_CONTEXT", True, Reason.DEVICE_MEMORY_INVALID),
    ],
)
async def test_only_what_another_pid_may_change_is_tried_with_another_worker(
    mappings: Mappings, workers: Workers, reason: Reason, error: str, renewable: bool, told: Reason
) -> None:
    await mappings.register_words(SESSION, GPU, 0, 1, 1)
    workers.refuse, workers.renewable = Refusal(reason, "no", value=error), renewable
    with pytest.raises(Refusal) as refusal:
        await mappings.register_memory(SESSION, None, 1, [])
    assert refusal.value.reason is told
