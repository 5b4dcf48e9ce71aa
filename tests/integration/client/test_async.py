"""The asyncio client: the same answers as the blocking one, on the caller's loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import kvtier.aio
import pytest
from kvtier import ClientOptions, ClientState, Doorbell, Namespace, Reason, TransferState

from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import READY_S, TRANSFER_S, Cache, block_hashes

HASHES = block_hashes("sequence", range(20))
Connect = Callable[..., Coroutine[Any, Any, "Plain"]]


def _registrations(plain: Plain, count: int) -> bool:
    return plain.client.status.counters.registrations >= count


class Plain:
    """An async client and its cache."""

    def __init__(self, **options: Any) -> None:
        self.cache = Cache()
        given: ClientOptions = {"groups": [self.cache.group], "memory": self.cache.memory, **options}  # type: ignore[typeddict-item]
        self.client = kvtier.aio.Client(**given)

    async def store(self) -> None:
        for block, value in enumerate(HASHES):
            self.cache.fill(block, value)
        assert (await self.client.store(HASHES, range(20)).wait(TRANSFER_S)).done

    async def load(self) -> int:
        self.cache.wipe()
        with await self.client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
            if hit.hits:
                assert (await self.client.load(hit, range(hit.hits)).wait(TRANSFER_S)).done
        assert all(self.cache.right(block, HASHES[block]) for block in range(hit.hits))
        return hit.hits

    async def close(self) -> None:
        assert await self.client.close()
        self.cache.close()


@pytest.fixture
async def connect(namespace: Namespace) -> AsyncIterator[Connect]:
    made: list[Plain] = []

    async def make(host: DaemonHost, name: str = "one", *, ready: bool = True) -> Plain:
        instance = f"{namespace.tenant}/{name}"
        made.append(Plain(instance=instance, namespace=namespace, socket=host.socket))
        if ready:
            assert await made[-1].client.wait_ready(READY_S), made[-1].client.status
        return made[-1]

    yield make
    for plain in made:
        await plain.close()


async def test_what_was_stored_comes_back_byte_for_byte(shared_host: DaemonHost, connect: Connect) -> None:
    first, second = await connect(shared_host, "one"), await connect(shared_host, "two")
    await first.store()
    assert await first.load() == 20
    assert await second.load() == 20


async def test_many_tasks_share_one_client(shared_host: DaemonHost, connect: Connect) -> None:
    plain = await connect(shared_host)
    await plain.store()

    async def look(count: int) -> int:
        with await plain.client.lookup(HASHES[:count], lease=True, timeout_s=READY_S) as hit:
            return hit.hits

    assert await asyncio.gather(*(look(1 + number % 20) for number in range(200))) == [
        1 + number % 20 for number in range(200)
    ]
    # In a thread, here and below: the client gives leases back on this loop.
    await asyncio.to_thread(until, lambda: shared_host.status().leases == 0, "no lease is left")


async def test_a_cancelled_lookup_gives_its_lease_back(shared_host: DaemonHost, connect: Connect) -> None:
    plain = await connect(shared_host)
    await plain.store()
    for _ in range(20):
        task = asyncio.create_task(plain.client.lookup(HASHES, lease=True, timeout_s=READY_S))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await plain.load() == 20
    # A load may have landed before the daemon's answer to it is here, which ends its lease.
    await asyncio.to_thread(until, lambda: plain.client.status.leases == 0, "the client has no lease")
    await asyncio.to_thread(until, lambda: shared_host.status().leases == 0, "no lease is left")


async def test_a_cancelled_wait_does_not_cancel_the_transfer(
    shared_host: DaemonHost, connect: Connect
) -> None:
    plain = await connect(shared_host)
    transfer = plain.client.store(HASHES, range(20), doorbell=Doorbell(0, 1))
    task = asyncio.create_task(transfer.wait(READY_S))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    plain.client.ring(0, 1)
    assert (await transfer.wait(TRANSFER_S)).done


@pytest.mark.faults
async def test_it_outlives_its_daemon(host: DaemonHost, connect: Connect) -> None:
    plain = await connect(host)
    await plain.store()
    waiting = plain.client.store(block_hashes("w", range(4)), range(4), doorbell=Doorbell(0, 1))
    await asyncio.to_thread(host.kill9)
    outcome = await waiting.wait(TRANSFER_S)
    assert (outcome.state, outcome.fenced) == (TransferState.FAILED, True)
    assert not (await plain.client.lookup(HASHES, timeout_s=0.5)).answered
    await asyncio.to_thread(host.start)
    assert await plain.client.wait_ready(READY_S)
    assert await plain.load() == 20


@pytest.mark.faults
async def test_a_stopped_daemon_and_a_lost_worker(host: DaemonHost, connect: Connect) -> None:
    plain = await connect(host)
    await plain.store()
    host.freeze()
    for _ in range(100):
        assert not (await plain.client.lookup(HASHES, timeout_s=0.5)).answered
    assert plain.client.status.state is ClientState.UNRESPONSIVE
    host.thaw()
    assert await plain.client.wait_ready(READY_S)
    registered_again = partial(_registrations, plain, plain.client.status.counters.registrations + 1)
    await asyncio.to_thread(host.kill_worker)
    await asyncio.to_thread(until, registered_again, "it has registered again")
    assert await plain.client.wait_ready(READY_S)
    assert await plain.load() == 20


async def test_without_a_daemon_it_misses_and_closes(idle_host: DaemonHost, connect: Connect) -> None:
    plain = await connect(idle_host, ready=False)
    answer = await plain.client.lookup(HASHES, timeout_s=60)
    assert answer.error is not None
    assert answer.error.reason is Reason.NOT_ATTACHED
    assert not await plain.client.wait_ready(0.2)


async def test_closing_leaves_no_task_and_can_be_done_twice(
    shared_host: DaemonHost, connect: Connect
) -> None:
    before = asyncio.all_tasks()
    plain = await connect(shared_host)
    assert await plain.client.close()
    assert await plain.client.close()
    if left := asyncio.all_tasks() - before:  # gRPC's own end a moment later
        assert not (await asyncio.wait(left, timeout=READY_S))[1]
    assert plain.client.status.state is ClientState.CLOSED
    assert not (await plain.client.lookup(HASHES)).answered


@pytest.mark.parametrize("ending", ["assert await plain.client.close()", "pass", "raise SystemExit(0)"])
def test_a_program_ends_without_hanging_and_without_grpcs_threads(
    shared_host: DaemonHost, ending: str
) -> None:
    program = f"""
import asyncio, sys, threading
from tests.integration.client.test_async import Plain
from tests.support.plain_client import NAMESPACE
async def main():
    plain = Plain(instance="program", namespace=NAMESPACE, socket=sys.argv[1])
    assert await plain.client.wait_ready(60)
    await plain.store()
    assert await plain.load() == 20
    {ending}
try:
    asyncio.run(main())
finally:
    for thread in set(threading.enumerate()) - {{threading.main_thread()}}:
        thread.join(30)  # gRPC's own end a moment later
    assert threading.active_count() == 1, threading.enumerate()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(shared_host.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
