"""Words shared between processes: each change is all or nothing, and parts have one owner at a time."""

import mmap
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import (
    PART_ARMED,
    PART_DONE,
    PART_FAILED,
    PART_REVOKED,
    PART_STARTED,
    PART_SUPERSEDED,
    TICKET_MAX,
    SharedWords,
)

JOIN_S = 60


@pytest.fixture
def words() -> SharedWords:
    return SharedWords(bytearray(64), 8)


def test_words_start_as_the_memory_is_and_write_through_to_it() -> None:
    memory = np.arange(4, dtype=np.uint64)
    words = SharedWords(memory, 3)
    assert (words.count, words.load(2)) == (3, 2)
    words.store(1, (1 << 64) - 1)
    assert memory.tolist() == [0, (1 << 64) - 1, 2, 3]
    assert words.load_many(np.array([2, 1, 1], np.uint32)).tolist() == [2, (1 << 64) - 1, (1 << 64) - 1]


def test_compare_exchange_sets_only_what_was_expected(words: SharedWords) -> None:
    assert words.compare_exchange(0, 0, 5)
    assert not words.compare_exchange(0, 0, 6)
    assert words.load(0) == 5


def test_a_doorbell_never_goes_back(words: SharedWords) -> None:
    for value, expected in ((5, 5), (3, 5), (5, 5), (6, 6), (0, 6)):
        words.ring(1, value)
        assert words.load(1) == expected


def test_a_part_starts_once_and_then_cannot_be_revoked(words: SharedWords) -> None:
    assert words.part_state(0, 7) == PART_ARMED
    assert words.try_start(0, 7)
    assert not words.try_start(0, 7)
    assert not words.try_revoke(0, 7)
    assert words.part_state(0, 7) == PART_STARTED
    words.finish(0, 7, PART_DONE)
    assert words.part_state(0, 7) == PART_DONE
    assert not words.try_revoke(0, 7)
    assert words.load(0) == 7 << 8 | PART_DONE


def test_a_revoked_part_never_starts_and_can_be_revoked_again(words: SharedWords) -> None:
    assert words.try_revoke(0, 7)
    assert words.try_revoke(0, 7)
    assert not words.try_start(0, 7)
    assert words.part_state(0, 7) == PART_REVOKED


def test_a_later_ticket_supersedes_an_earlier_one(words: SharedWords) -> None:
    assert words.try_revoke(0, 7)
    assert words.try_start(0, 8)
    assert words.part_state(0, 7) == PART_SUPERSEDED
    assert not words.try_revoke(0, 7)
    assert not words.try_start(0, 7)
    assert words.part_state(0, 9) == PART_ARMED
    words.finish(0, 8, PART_FAILED)
    assert words.part_state(0, 8) == PART_FAILED


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda words: None, "it holds ticket 0 in state 0"),
        (lambda words: words.try_revoke(0, 7), "it holds ticket 7 in state 2"),
        (lambda words: words.try_start(0, 8), "it holds ticket 8 in state 1"),
    ],
)
def test_only_a_started_part_can_be_finished(
    words: SharedWords, prepare: Callable[[SharedWords], object], message: str
) -> None:
    prepare(words)
    before = words.load(0)
    with pytest.raises(RuntimeError, match=f"word 0 does not say STARTED for ticket 7: {message}"):
        words.finish(0, 7, PART_DONE)
    assert words.load(0) == before


@pytest.mark.parametrize("garbage", [7 << 8, 7 << 8 | 5, 7 << 8 | 0xFF])
def test_a_value_that_no_part_word_has_is_reported_and_not_believed(words: SharedWords, garbage: int) -> None:
    words.store(0, garbage)
    with pytest.raises(RuntimeError, match="unknown state"):
        words.part_state(0, 7)
    assert not words.try_start(0, 7)
    assert words.try_start(0, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda words: words.load(8), "index is 8; there are 8 words"),
        (lambda words: words.store(8, 1), "index is 8; there are 8 words"),
        (lambda words: words.compare_exchange(1 << 40, 0, 1), "index is 1099511627776; there are 8 words"),
        (lambda words: words.load_many(np.array([0, 8], np.uint32)), "indexes[1] is 8; there are 8 words"),
        (lambda words: words.ring(8, 1), "index is 8; there are 8 words"),
        (lambda words: words.try_start(8, 1), "index is 8; there are 8 words"),
        (lambda words: words.try_revoke(8, 1), "index is 8; there are 8 words"),
        (lambda words: words.finish(8, 1, PART_DONE), "index is 8; there are 8 words"),
        (lambda words: words.part_state(8, 1), "index is 8; there are 8 words"),
        (lambda words: words.try_start(0, 0), "ticket is 0; expected 1 to 2^56 - 1"),
        (lambda words: words.try_revoke(0, TICKET_MAX + 1), f"ticket is {1 << 56}; expected 1 to 2^56 - 1"),
        (lambda words: words.part_state(0, 0), "ticket is 0; expected 1 to 2^56 - 1"),
        (lambda words: words.finish(0, 1, PART_STARTED), "state is 1; expected 3 (DONE) or 4 (FAILED)"),
        (lambda words: SharedWords(bytearray(64), 9), "count is 9, but the buffer has room for 8 words"),
        (lambda words: SharedWords(bytearray(64), 0), "count is 0; at least one word is needed"),
        (lambda words: SharedWords(memoryview(bytearray(64))[4:60], 2), "buffer is not aligned to 8 bytes"),
        (lambda words: SharedWords(bytes(64), 8), "buffer of type bytes is not a C-contiguous writable"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    words: SharedWords, call: Callable[[SharedWords], object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(words)
    assert words.load_many(np.arange(8, dtype=np.uint32)).tolist() == [0] * 8


def test_the_largest_ticket_fits(words: SharedWords) -> None:
    assert words.try_start(0, TICKET_MAX)
    words.finish(0, TICKET_MAX, PART_DONE)
    assert words.part_state(0, TICKET_MAX) == PART_DONE


def test_the_mapping_cannot_be_closed_under_its_words() -> None:
    with mmap.mmap(-1, 4096) as memory:
        words = SharedWords(memory, 8)
        with pytest.raises(BufferError):
            memory.close()
        del words


@given(st.lists(st.tuples(st.sampled_from(["start", "revoke", "finish"]), st.integers(1, 4)), max_size=30))
def test_a_word_does_what_the_contract_says_for_any_sequence(steps: list[tuple[str, int]]) -> None:
    words = SharedWords(bytearray(8), 1)
    ticket, state = 0, PART_ARMED
    for step, asked in steps:
        if step == "finish":
            if (ticket, state) == (asked, PART_STARTED):
                words.finish(0, asked, PART_DONE)
                state = PART_DONE
            else:
                with pytest.raises(RuntimeError):
                    words.finish(0, asked, PART_DONE)
            continue
        wins = asked > ticket
        if step == "start":
            assert words.try_start(0, asked) == wins
        else:
            assert words.try_revoke(0, asked) == (wins or (ticket, state) == (asked, PART_REVOKED))
        if wins:
            ticket, state = asked, PART_STARTED if step == "start" else PART_REVOKED
    assert words.load(0) == ticket << 8 | state


# --- several threads and processes ---

PARTS, WORDS = 3000, 4


@pytest.fixture
def memfd() -> Iterator[int]:
    descriptor = os.memfd_create("kvtier-test-words")
    os.ftruncate(descriptor, 4096)
    yield descriptor
    os.close(descriptor)


def decide_parts(words: SharedWords, start: bool) -> list[int]:
    """Goes for every part in the order of tickets, as worker or as client; returns those it won. A word gets
    its next part when the last one is over, as the daemon sees to."""
    won = []
    for ticket in range(1, PARTS + 1):
        index = ticket % WORDS
        while ticket > WORDS and words.part_state(index, ticket - WORDS) == PART_STARTED:
            time.sleep(0)
        if start:
            if words.try_start(index, ticket):
                won.append(ticket)
                words.finish(index, ticket, PART_DONE)
        elif words.try_revoke(index, ticket):
            won.append(ticket)
    return won


def decide_in_process(descriptor: int, go: int, results: int, start: bool) -> None:
    """Body of a process of its own."""
    with mmap.mmap(descriptor, 4096) as memory:
        words = SharedWords(memory, 8)
        os.read(go, 1)
        won = decide_parts(words, start)
        words.ring(7, PARTS if start else 2 * PARTS)
        del words
    with os.fdopen(results, "wb") as out:
        out.write(np.array(won, np.uint32).tobytes())


def test_worker_and_client_processes_never_both_win_a_part(memfd: int) -> None:
    context = multiprocessing.get_context("fork")  # the child inherits the descriptors
    go_read, go_write = os.pipe()
    outcomes, processes = [], []
    for start in (True, False):
        results_read, results_write = os.pipe()
        process = context.Process(target=decide_in_process, args=(memfd, go_read, results_write, start))
        process.start()
        os.close(results_write)
        outcomes.append(os.fdopen(results_read, "rb"))
        processes.append(process)
    os.write(go_write, b"..")
    started, revoked = (set(np.frombuffer(out.read(), np.uint32).tolist()) for out in outcomes)
    for process, out in zip(processes, outcomes, strict=True):
        process.join(JOIN_S)
        assert process.exitcode == 0
        process.close()
        out.close()
    os.close(go_read)
    os.close(go_write)
    assert not started & revoked
    with mmap.mmap(memfd, 4096) as memory:
        words = SharedWords(memory, 8)
        assert words.load(7) == 2 * PARTS
        for index in range(WORDS):
            last = max(ticket for ticket in range(1, PARTS + 1) if ticket % WORDS == index)
            assert words.part_state(index, last) == (PART_DONE if last in started else PART_REVOKED)
            assert last in started | revoked
        del words


def test_threads_that_race_for_parts_and_doorbells_lose_nothing() -> None:
    words = SharedWords(bytearray(64), 8)

    def ring_often() -> None:
        for value in range(2000):
            words.ring(6, value)

    won: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: won.update({n: decide_parts(words, start=n % 2 == 0)}))
        for n in range(4)
    ]
    bells = [threading.Thread(target=ring_often) for _ in range(2)]
    for thread in threads + bells:
        thread.start()
    for thread in threads + bells:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert words.load(6) == 1999
    assert not set(won[0]) & set(won[2])
    assert not (set(won[0]) | set(won[2])) & (set(won[1]) | set(won[3]))
