"""The fence: what a rank knows of its parts, against workers that race it, die, or belong to the past."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier import KvtierError, PartRef, PartState, Reason
from kvtier.words import PAGES_KEPT, RankWords, WordsPage

from tests.unit.client.peer import DOORBELLS, worker_words

PARTS = 16


def ref(word: int = 0, ticket: int = 1, epoch: int = 1) -> PartRef:
    return PartRef(epoch, ticket, word, "load")


@pytest.fixture
def words() -> Iterator[RankWords]:
    made = RankWords(DOORBELLS, PARTS)
    made.begin_epoch(1)
    yield made
    made.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Something with a pid that lives until it is told otherwise."""
    started = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    assert started.stdin is not None
    started.stdin.close()
    started.wait(20)


def adopt(page: WordsPage, process: subprocess.Popen[bytes]) -> None:
    page.adopt_worker(os.pidfd_open(process.pid))


def test_a_part_goes_from_armed_over_started_to_done(words: RankWords) -> None:
    worker = worker_words(words.new_page())
    assert words.state(ref()) is PartState.ARMED
    assert worker.try_start(DOORBELLS, 1)
    assert words.state(ref()) is PartState.STARTED
    worker.finish(DOORBELLS, 1, PartState.DONE.value)
    assert words.state(ref()) is PartState.DONE
    assert words.state(ref()).over


def test_what_was_revoked_never_starts_and_what_started_cannot_be_revoked(words: RankWords) -> None:
    worker = worker_words(words.new_page())
    assert words.revoke(ref(0)) is PartState.REVOKED
    assert not worker.try_start(DOORBELLS, 1)
    assert worker.try_start(DOORBELLS + 1, 2)
    assert words.revoke(ref(1, 2)) is PartState.STARTED


def test_a_store_is_withdrawn_even_while_it_runs_unless_it_has_ended(words: RankWords) -> None:
    worker = worker_words(words.new_page())
    running, ended = PartRef(1, 1, 0, "store"), PartRef(1, 2, 1, "store")
    assert worker.try_start(DOORBELLS, 1)
    assert worker.try_start(DOORBELLS + 1, 2)
    worker.finish(DOORBELLS + 1, 2, PartState.DONE.value)
    assert words.revoke(running) is PartState.REVOKED
    assert words.revoke(ended) is PartState.DONE
    with pytest.raises(RuntimeError):
        worker.finish(DOORBELLS, 1, PartState.DONE.value)
    assert words.state(running) is PartState.REVOKED


def test_a_running_store_of_an_epoch_that_is_over_is_withdrawn_too(words: RankWords) -> None:
    page = words.new_page()
    worker = worker_words(page)
    assert worker.try_start(DOORBELLS, 1)
    words.end_epoch()
    assert words.revoke(PartRef(1, 1, 0, "store")) is PartState.REVOKED
    words.reap()
    assert words.state(PartRef(1, 1, 0, "store")) is PartState.REVOKED


def test_revoke_and_start_race_and_exactly_one_wins(words: RankWords) -> None:
    worker = worker_words(words.new_page())
    rounds = 4_000
    turn = threading.Barrier(2)
    started: list[bool] = []

    def start() -> None:
        for ticket in range(1, rounds + 1):
            if ticket % 100 == 1:
                turn.wait(60)
            started.append(worker.try_start(DOORBELLS, ticket))

    thread = threading.Thread(target=start)
    thread.start()
    revoked = []
    for ticket in range(1, rounds + 1):
        if ticket % 100 == 1:
            turn.wait(60)
        revoked.append(words.revoke(ref(0, ticket)))
    thread.join(60)
    for did_start, state in zip(started, revoked, strict=True):
        if state is PartState.REVOKED:
            assert not did_start
        assert state is not PartState.ARMED, "a revoked part is never armed"


WORKER = """
import mmap, sys
from kvtier_kernels import SharedWords
words = SharedWords(mmap.mmap(int(sys.argv[1]), 0), int(sys.argv[2]))
first, parts, rounds = map(int, sys.argv[3:])
print("ready", flush=True)
sys.stdin.readline()
for ticket in range(1, rounds + 1):
    for part in range(parts):
        if words.try_start(first + part, ticket):
            words.finish(first + part, ticket, 3)
        elif words.part_state(first + part, ticket) == 5:
            sys.exit(0)  # sealed
"""


def test_after_a_seal_a_worker_in_another_process_starts_nothing(words: RankWords) -> None:
    page = words.new_page()
    arguments = [page.buffer.fileno(), DOORBELLS + PARTS, DOORBELLS, PARTS, 2_000_000]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[page.buffer.fileno()],
        text=True,
    )
    try:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        view = worker_words(page)
        worker.stdin.write("go\n")
        worker.stdin.flush()
        while view.load(DOORBELLS) >> 8 < 100:
            os.sched_yield()
        page.seal()
        assert worker.wait(60) == 0, "it found its words sealed"
        assert page.started() == 0
        for part in range(PARTS):
            assert page.state(part, 3_000_000) is None
            assert not view.try_start(DOORBELLS + part, 3_000_000)
    finally:
        worker.kill()
        worker.wait(20)
        worker.communicate()


def test_an_ended_epoch_keeps_what_was_over_and_loses_what_had_not_started(words: RankWords) -> None:
    worker = worker_words(words.new_page())
    for part, ticket in ((0, 1), (1, 2)):
        assert worker.try_start(DOORBELLS + part, ticket)
    worker.finish(DOORBELLS, 1, PartState.DONE.value)
    words.end_epoch()
    assert words.state(ref(0, 1)) is PartState.DONE
    assert words.state(ref(1, 2)) is PartState.STARTED
    assert words.state(ref(2, 3)) is PartState.LOST
    assert not worker.try_start(DOORBELLS + 2, 3)
    assert words.started() == 1
    worker.finish(DOORBELLS + 1, 2, PartState.FAILED.value)
    assert words.state(ref(1, 2)) is PartState.FAILED
    assert not worker.try_start(DOORBELLS + 1, 4), "the word is sealed too, once its part is over"
    words.reap()
    assert words.state(ref(0, 1)) is PartState.DONE, "still known when its page is given back"
    assert words.state(ref(1, 2)) is PartState.FAILED


def test_a_later_part_of_a_word_that_was_started_at_the_end_is_lost_only_when_it_cannot_start(
    words: RankWords,
) -> None:
    worker = worker_words(words.new_page())
    assert worker.try_start(DOORBELLS, 1)
    words.end_epoch()
    assert words.state(ref(0, 2)) is PartState.ARMED
    worker.finish(DOORBELLS, 1, PartState.DONE.value)
    assert words.state(ref(0, 2)) is PartState.LOST
    assert not worker.try_start(DOORBELLS, 2)
    assert words.state(ref(0, 1)) is PartState.DONE


def test_a_started_part_is_fenced_by_its_workers_death_and_by_nothing_less(
    words: RankWords, process: subprocess.Popen[bytes]
) -> None:
    page = words.new_page()
    adopt(page, process)
    assert worker_words(page).try_start(DOORBELLS, 1)
    words.end_epoch()
    words.begin_epoch(2)
    words.new_page()
    assert words.state(ref()) is PartState.STARTED
    assert words.revoke(ref()) is PartState.STARTED
    process.kill()
    process.wait(20)
    assert words.state(ref()) is PartState.FAILED
    words.reap()
    assert words.state(ref()) is PartState.FAILED


def test_an_end_written_just_before_the_workers_death_counts(
    words: RankWords, process: subprocess.Popen[bytes]
) -> None:
    page = words.new_page()
    adopt(page, process)
    worker = worker_words(page)
    assert worker.try_start(DOORBELLS, 1)
    worker.finish(DOORBELLS, 1, PartState.DONE.value)
    process.kill()
    process.wait(20)
    assert words.state(ref()) is PartState.DONE


def test_a_part_of_this_epoch_stays_armed_between_two_registrations_unless_revoked(words: RankWords) -> None:
    first = worker_words(words.new_page())
    second_page = words.new_page()
    assert not first.try_start(DOORBELLS, 1), "the first page is sealed"
    assert words.state(ref(0, 1)) is PartState.ARMED, "the daemon may still post it to the new worker"
    second = worker_words(second_page)
    assert second.try_start(DOORBELLS, 1)
    assert words.state(ref(0, 1)) is PartState.STARTED


def test_what_is_revoked_while_no_page_is_registered_never_starts_on_the_next(words: RankWords) -> None:
    assert words.state(ref(3, 9)) is PartState.ARMED
    assert words.revoke(ref(3, 9)) is PartState.REVOKED
    worker = worker_words(words.new_page())
    assert not worker.try_start(DOORBELLS + 3, 9)
    assert worker.try_start(DOORBELLS + 3, 10), "a later transfer may"


def test_a_part_of_an_epoch_that_never_was_ours_is_lost(words: RankWords) -> None:
    words.new_page()
    assert words.state(ref(epoch=2)) is PartState.LOST
    assert words.revoke(ref(epoch=2)) is PartState.LOST


def test_a_word_given_to_a_later_transfer_says_that_the_earlier_one_is_over(words: RankWords) -> None:
    worker = worker_words(words.new_page())
    assert worker.try_start(DOORBELLS, 5)
    assert words.state(ref(0, 4)) is PartState.LOST


def test_doorbells_carry_over_to_the_next_page_and_never_go_back(words: RankWords) -> None:
    words.ring(1, 10)
    first = worker_words(words.new_page())
    assert first.load(1) == 10
    words.ring(1, 12)
    words.ring(1, 11)
    assert first.load(1) == 12
    assert worker_words(words.new_page()).load(1) == 12
    assert first.load(1) == 12


def test_fenced_pages_of_the_past_are_given_back_and_few_are_remembered(words: RankWords) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    for epoch in range(2, 40):
        words.new_page()
        words.end_epoch()
        words.begin_epoch(epoch)
    assert len(words._pages) <= PAGES_KEPT + 1
    assert len(os.listdir("/proc/self/fd")) <= open_files + 1


@pytest.mark.parametrize("state", [0, 5, 0xFF])
def test_a_word_that_makes_no_sense_is_not_believed_to_be_over(words: RankWords, state: int) -> None:
    worker = worker_words(words.new_page())
    worker.store(DOORBELLS, 1 << 8 | state)
    assert words.state(ref()) is PartState.STARTED


@pytest.mark.parametrize(
    ("bad", "field"),
    [(ref(PARTS), "word"), (ref(-1), "word"), (ref(0, 0), "ticket"), (ref(0, 2**56), "ticket")],
)
def test_a_reference_that_cannot_be_ours_is_refused(words: RankWords, bad: PartRef, field: str) -> None:
    for call in (words.state, words.revoke):
        with pytest.raises(KvtierError) as refused:
            call(bad)
        assert refused.value.field == field


def test_a_doorbell_that_does_not_exist_is_refused(words: RankWords) -> None:
    with pytest.raises(KvtierError) as refused:
        words.ring(DOORBELLS, 1)
    assert refused.value.reason is Reason.WORD_INDEX_RANGE


def test_a_reference_travels_as_plain_values() -> None:
    assert pickle.loads(pickle.dumps(ref(3, 4))) == ref(3, 4)  # noqa: S301


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "start", "finish", "revoke", "register", "reattach"]), st.integers(0, 20)
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_over_is_for_ever_and_true(actions: list[tuple[str, int]]) -> None:
    """Against workers that may do whatever real ones may: once a part is said to be over, it never runs
    again."""
    words = RankWords(DOORBELLS, 4)
    epoch, ticket = 1, 0
    words.begin_epoch(epoch)
    workers = [worker_words(words.new_page())]
    epochs = [epoch]  # of each worker's page
    parts: list[PartRef] = []
    running: dict[PartRef, int] = {}
    over: dict[PartRef, PartState] = {}
    for action, pick in actions:
        if action == "submit":
            ticket += 1
            busy = {part.word for part in parts if part not in over and part.epoch == epoch}
            free = [word for word in range(4) if word not in busy]
            if free:
                parts.append(PartRef(epoch, ticket, free[pick % len(free)], "load"))
        elif action == "register":
            workers.append(worker_words(words.new_page()))
            epochs.append(epoch)
        elif action == "reattach":
            words.end_epoch()
            epoch += 1
            words.begin_epoch(epoch)
            workers.append(worker_words(words.new_page()))
            epochs.append(epoch)
        elif parts:
            part = parts[pick % len(parts)]
            if action == "start" and part not in running and part not in over:
                for index in {pick % len(workers), len(workers) - 1}:
                    # Workers have pages of their own epoch only, and get parts of that epoch only.
                    if part in running or part.epoch != epochs[index]:
                        continue
                    if workers[index].try_start(DOORBELLS + part.word, part.ticket):
                        running[part] = index
            elif action == "finish" and part in running:
                workers[running.pop(part)].finish(DOORBELLS + part.word, part.ticket, PartState.DONE.value)
            elif action == "revoke":
                words.revoke(part)
        for part in parts:
            state = words.state(part)
            if part in running:
                assert not state.over, (part, state)
            if part in over:
                assert state.over, (part, over[part], state)
            if state.over:
                over[part] = state
    words.close()
