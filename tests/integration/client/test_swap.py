"""Swap space on a real daemon: what goes out comes back bit for bit, as a whole or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvtier import Client, KvtierError, Namespace, Reason, Role
from kvtier import swap as swapping
from kvtier.swap import CanSwap, Swapped, SwapSpace, SwapState

from tests.integration.client.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import BLOCKS, PlainClient

pytestmark = pytest.mark.faults
SPACE = 40


def settle(space: SwapSpace, swapped: Swapped, *states: SwapState) -> SwapState:
    """Polls until it is in one of these states."""
    until(lambda: space.poll(swapped) in states, f"{[state.value for state in states]}")
    return swapped.state


def write(plain: PlainClient, blocks: list[int], seed: int) -> None:
    bytes_of = np.random.default_rng(seed)
    for block in blocks:
        shape = plain.cache.planes[:, block].shape
        plain.cache.planes[:, block] = bytes_of.integers(0, 256, shape, np.uint8)


def read(plain: PlainClient, blocks: list[int]) -> list[bytes]:
    return [plain.cache.planes[:, block].tobytes() for block in blocks]


@pytest.fixture
def plain(shared_host: DaemonHost, connect_to: Connect) -> PlainClient:
    return connect_to(shared_host)


@pytest.fixture
def space(plain: PlainClient) -> SwapSpace:
    return SwapSpace(plain.client, SPACE)


def test_forked_sequences_go_out_and_come_back(space: SwapSpace, plain: PlainClient) -> None:
    sequences = {"a": [7, 8, 9], "b": [7, 8, 12]}
    write(plain, [7, 8, 9, 12], seed=1)
    before = {name: read(plain, blocks) for name, blocks in sequences.items()}
    assert space.can_swap_out([7, 8, 9, 7, 8, 12]) is CanSwap.OK
    swapped = space.swap_out(sequences)
    assert set(swapped.block_map) == {7, 8, 9, 12}
    assert space.free_blocks == SPACE - 4
    settle(space, swapped, SwapState.OUT)
    plain.cache.wipe()
    assert space.can_swap_in(swapped, free_blocks=4, all_blocks=BLOCKS) is CanSwap.OK
    tables = space.swap_in(swapped, [30, 31, 32, 33])
    assert tables["a"][:2] == tables["b"][:2], "what was shared is shared again"
    settle(space, swapped, SwapState.IN)
    assert {name: read(plain, table) for name, table in tables.items()} == before
    assert space.free_blocks == SPACE
    assert plain.client.status.leases == 0


def test_a_client_without_a_rank_is_refused(shared_host: DaemonHost, namespace: Namespace) -> None:
    scheduler = Client(
        instance="scheduler", namespace=namespace, role=Role.SCHEDULER, socket=shared_host.socket
    )
    try:
        with pytest.raises(KvtierError, match="cannot tell when a load of a killed daemon has landed"):
            SwapSpace(scheduler, SPACE)
    finally:
        scheduler.close()


def test_verdicts(space: SwapSpace, plain: PlainClient) -> None:
    assert space.can_swap_out(range(SPACE + 1)) is CanSwap.NEVER
    swapped = space.swap_out({"a": list(range(30))})
    assert space.can_swap_out(range(SPACE - 30)) is CanSwap.OK
    assert space.can_swap_out(range(SPACE - 29)) is CanSwap.LATER
    with pytest.raises(KvtierError, match="cannot be swapped out: later"):
        space.swap_out({"b": list(range(SPACE - 29))})
    assert space.can_swap_in(swapped, free_blocks=60, all_blocks=BLOCKS) is CanSwap.LATER, "it is not out yet"
    settle(space, swapped, SwapState.OUT)
    watermark = SwapSpace(plain.client, SPACE, watermark=0.1)
    assert watermark.can_swap_in(swapped, free_blocks=39, all_blocks=100) is CanSwap.LATER
    assert watermark.can_swap_in(swapped, free_blocks=40, all_blocks=100) is CanSwap.OK
    assert watermark.can_swap_in(swapped, free_blocks=40, all_blocks=100, lookahead=1) is CanSwap.LATER
    assert space.can_swap_in(swapped, free_blocks=29, all_blocks=29) is CanSwap.NEVER
    for wrong in ([1], [*range(29), 0]):
        with pytest.raises(KvtierError, match="the group has 30 blocks"):
            space.swap_in(swapped, wrong)
    space.discard(swapped)
    assert space.free_blocks == SPACE
    with pytest.raises(KvtierError, match="only what is out can come in"):
        space.swap_in(swapped, [])


def test_a_sequence_that_ends_while_it_is_out_frees_what_no_other_has(
    space: SwapSpace, plain: PlainClient
) -> None:
    write(plain, list(range(6)), seed=2)
    rest = read(plain, [0, 1, 4])
    swapped = space.swap_out({"a": [0, 1, 2, 3], "b": [0, 1, 4]})
    settle(space, swapped, SwapState.OUT)
    with pytest.raises(KvtierError, match="no sequence of this group"):
        space.drop(swapped, "c")
    space.drop(swapped, "a")
    assert space.free_blocks == SPACE - 3
    plain.cache.wipe()
    tables = space.swap_in(swapped, [50, 51, 52])
    settle(space, swapped, SwapState.IN)
    assert read(plain, tables["b"]) == rest
    assert list(tables) == ["b"]


def test_what_is_out_is_not_evicted_and_its_lease_is_renewed(
    socket_dir: Path, shm_dir: Path, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping, "RENEW_S", 0.0)
    small = DaemonHost(socket_dir, shm_dir / "pool", pool__size="4MiB", pool__extent_size="1MiB")
    small.start()
    plain = connect_to(small)
    space = SwapSpace(plain.client, 20)
    write(plain, list(range(20)), seed=3)
    before = read(plain, list(range(20)))
    swapped = space.swap_out({"a": list(range(20))})
    settle(space, swapped, SwapState.OUT)
    first = swapped._lease
    for number in range(8):
        write(plain, list(range(20, BLOCKS)), seed=10 + number)
        names = [random.Random(number * 100 + i).randbytes(32) for i in range(BLOCKS - 20)]
        plain.client.store(names, range(20, BLOCKS)).wait(60)
        space.tick()
    until(lambda: space.poll(swapped) is SwapState.OUT and swapped._lease is not first, "a new lease")
    plain.cache.wipe()
    tables = space.swap_in(swapped, list(range(40, 60)))
    settle(space, swapped, SwapState.IN)
    assert read(plain, tables["a"]) == before
    assert plain.close()
    small.stop()


def test_after_kill_nine_of_the_daemon_it_comes_back_from_the_new_one(
    host: DaemonHost, connect_to: Connect
) -> None:
    plain = connect_to(host)
    space = SwapSpace(plain.client, SPACE)
    write(plain, list(range(10)), seed=4)
    before = read(plain, list(range(10)))
    swapped = space.swap_out({"a": list(range(10))})
    settle(space, swapped, SwapState.OUT)
    host.kill9()
    until(lambda: not plain.client.ready, "the daemon is gone")
    assert space.can_swap_out([1]) is CanSwap.LATER
    assert space.poll(swapped) is SwapState.OUT
    space.swap_in(swapped, list(range(10, 20)))
    settle(space, swapped, SwapState.OUT)  # nobody is there to ask
    assert swapped.error is not None
    host.start()
    plain.ready()
    plain.cache.wipe()
    tables = space.swap_in(swapped, list(range(20, 30)))
    settle(space, swapped, SwapState.IN)
    assert read(plain, tables["a"]) == before


def test_what_was_lost_says_so(host: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(host)
    space = SwapSpace(plain.client, SPACE)
    out = space.swap_out({"a": list(range(10))})
    settle(space, out, SwapState.OUT)
    host.kill9()
    host.pool.unlink()
    going = None
    try:
        going = space.swap_out({"b": [1]})
    except KvtierError as error:  # the client has noticed already
        if error.reason is not Reason.QUEUE_FULL:
            raise
    host.start()
    plain.ready()
    assert settle(space, out, SwapState.LOST) is SwapState.LOST
    if going is not None:
        settle(space, going, SwapState.KEPT)
    assert space.can_swap_in(out, free_blocks=60, all_blocks=64) is CanSwap.NEVER
    assert space.free_blocks == SPACE


@pytest.mark.parametrize("seed", range(3))
def test_in_disorder_no_byte_is_wrong(seed: int, host: DaemonHost, connect_to: Connect) -> None:
    """Groups go out and come in, sequences end, the daemon is killed; a model keeps every block's bytes."""
    chance, plain = random.Random(seed), connect_to(host)
    space, free = SwapSpace(plain.client, SPACE), set(range(BLOCKS))
    here: list[dict[str, list[int]]] = []
    away: dict[Swapped, dict[str, list[bytes]]] = {}
    came_back = 0

    def take(count: int) -> list[int]:
        chosen = chance.sample(sorted(free), count)
        free.difference_update(chosen)
        return chosen

    def come_back(swapped: Swapped) -> None:
        nonlocal came_back
        wanted = len(swapped.counts)
        if space.can_swap_in(swapped, free_blocks=len(free), all_blocks=BLOCKS) is not CanSwap.OK:
            return
        targets = take(wanted)
        tables = space.swap_in(swapped, targets)
        state = settle(space, swapped, SwapState.IN, SwapState.OUT, SwapState.LOST)
        free.update(targets)
        if state is SwapState.IN:
            bytes_of = away.pop(swapped)
            assert {name: read(plain, table) for name, table in tables.items()} == bytes_of
            came_back += 1
        assert state is not SwapState.LOST, swapped.error

    actions: list[Callable[[], None]] = []

    def compute() -> None:
        if len(free) >= 8:
            blocks = take(chance.randint(2, 8))
            write(plain, blocks, seed=chance.getrandbits(32))
            fork = chance.randint(1, len(blocks))
            here.append({"a": blocks} if chance.random() < 0.5 else {"a": blocks[:-1], "b": blocks[:fork]})
            free.update(set(blocks) - {block for table in here[-1].values() for block in table})

    def go_out() -> None:
        if not here:
            return
        sequences = here.pop(chance.randrange(len(here)))
        blocks = {block for table in sequences.values() for block in table}
        if space.can_swap_out(blocks) is not CanSwap.OK:
            here.append(sequences)
            return
        bytes_of = {name: read(plain, table) for name, table in sequences.items()}
        swapped = space.swap_out(sequences)
        if settle(space, swapped, SwapState.OUT, SwapState.KEPT) is SwapState.KEPT:
            here.append(sequences)
            return
        away[swapped] = bytes_of
        for block in blocks:
            plain.cache.planes[:, block] = 0x3F
        free.update(blocks)

    def come_in() -> None:
        if away:
            come_back(chance.choice(list(away)))

    def end() -> None:
        if away and (swapped := chance.choice(list(away))).state is SwapState.OUT:
            name = chance.choice(list(swapped.sequences))
            space.drop(swapped, name)
            del away[swapped][name]
            if not away[swapped]:
                del away[swapped]

    def kill() -> None:
        host.kill9()
        space.tick()
        until(lambda: not plain.client.ready, "the daemon is gone")
        host.start()
        plain.ready()

    actions = [compute] * 4 + [go_out] * 4 + [come_in] * 4 + [end] + [space.tick]
    for number in range(80):
        chance.choice(actions)()
        if number % 30 == 29:
            kill()
    for swapped in list(away):
        until(lambda swapped=swapped: space.poll(swapped) is SwapState.OUT, "it is there")
        come_back(swapped)
    assert not away
    assert came_back >= 5
    assert space.free_blocks == SPACE
