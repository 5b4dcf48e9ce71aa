"""Descriptors that are held back are free when a worker is started, and not for anybody else."""

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvtierd.workers.supervisor.reserve import DescriptorReserve

COUNT = 8


def opened(at_most: int = 1_000) -> list[int]:
    """Opens files until there are no more."""
    found = []
    try:
        for _ in range(at_most):
            found.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    return found


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    listed = os.listdir("/proc/self/fd")
    used = {int(name) for name in listed if os.path.exists(f"/proc/self/fd/{name}")}  # not that of the list
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = next(itertools.islice((n for n in itertools.count() if n not in used), left, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def reserve() -> Iterator[DescriptorReserve]:
    with few_descriptors(3 * COUNT):
        reserve = DescriptorReserve(COUNT)
        yield reserve
        reserve.close()


def test_what_is_held_back_is_free_only_while_it_is_lent(reserve: DescriptorReserve) -> None:
    clients = opened()
    assert opened() == []
    with reserve.lent():
        worker = opened(3)
        assert len(worker) == 3
        more = opened()
        assert len(more) == COUNT - 3
        close(more)
    assert opened() == []
    close(worker)
    close(clients)


def test_what_an_ended_worker_had_is_held_back_again(reserve: DescriptorReserve) -> None:
    clients = opened()
    for _ in range(3 * COUNT):  # a worker that is replaced again and again
        with reserve.lent():
            worker = opened(3)
        assert len(worker) == 3
        close(worker)
        reserve.fill()
        assert opened() == []
    close(clients)


def test_a_reserve_that_finds_too_few_takes_what_there_is() -> None:
    with few_descriptors(3):
        reserve = DescriptorReserve(COUNT)
        assert opened() == []
        reserve.close()
        found = opened()
        close(found)
        assert len(found) == 3
