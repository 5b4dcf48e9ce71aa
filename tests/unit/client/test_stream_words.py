"""Doorbells that a stream writes, by hand: which page they are written to, and that no gate opens early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier import KvtierError, Reason, SharedBuffer
from kvtier.words import RankWords, WordsPage
from kvtier_kernels import SharedWords

from tests.unit.client.peer import worker_words

DOORBELLS, PARTS = 2, 3


class Stream:
    """A GPU: addresses are those of this process, and writes land when the test says so."""

    def __init__(self, words: RankWords, doorbells: int = DOORBELLS) -> None:
        self._words, self._doorbells = words, doorbells
        self._pages: dict[int, SharedWords] = {}
        self._queued: list[tuple[int, int]] = []

    def expose(self, buffer: SharedBuffer) -> None:
        address = buffer.array.ctypes.data
        self._pages[address] = SharedWords(buffer.array, self._doorbells)
        buffer.keep_mapped()
        self._words.expose(buffer, address)

    def new_page(self) -> WordsPage:
        page = self._words.new_page()
        self.expose(page.buffer)
        return page

    def ring(self, doorbell: int, value: int) -> bool:
        """Whether there was anything to ask of it."""
        wanted, address = self._words.ask(doorbell, value)
        if wanted:
            assert address is not None
            self._queued.append((address, value))
        return wanted

    def land(self, count: int = 1) -> None:
        for _ in range(count):
            address, value = self._queued.pop(0)
            base = max(page for page in self._pages if page <= address)
            self._pages[base].store((address - base) // 8, value)

    @property
    def queued(self) -> int:
        return len(self._queued)


@pytest.fixture
def words() -> Iterator[RankWords]:
    made = RankWords(DOORBELLS, PARTS)
    made.begin_epoch(1)
    yield made
    made.close()


@pytest.fixture
def stream(words: RankWords) -> Stream:
    return Stream(words)


def test_a_stream_writes_the_word_that_the_worker_reads(words: RankWords, stream: Stream) -> None:
    worker = worker_words(stream.new_page())
    assert stream.ring(1, 5)
    assert worker.load(1) == 0
    stream.land()
    assert worker.load(1) == 5


def test_without_a_page_it_is_somebody_elses_to_ring(words: RankWords) -> None:
    assert words.ask(0, 5) == (True, None)


def test_a_lower_value_is_not_asked_for(words: RankWords, stream: Stream) -> None:
    stream.new_page()
    stream.ring(0, 5)
    for value in (4, 5):
        assert not stream.ring(0, value)
    words.ring(1, 9)
    assert not stream.ring(1, 9)
    assert stream.ring(1, 10)


def test_a_new_page_starts_with_what_has_landed_not_with_what_was_asked(
    words: RankWords, stream: Stream
) -> None:
    stream.new_page()
    stream.ring(0, 5)
    stream.ring(1, 7)
    stream.land()
    worker = worker_words(stream.new_page())
    assert [worker.load(0), worker.load(1)] == [5, 0]


def test_what_lands_on_a_page_of_the_past_is_carried_over(words: RankWords, stream: Stream) -> None:
    stream.new_page()
    stream.ring(0, 5)
    worker = worker_words(stream.new_page())
    assert words.streams.behind
    words.carry_over()
    assert worker.load(0) == 0
    stream.land()
    words.carry_over()
    assert worker.load(0) == 5
    assert not words.streams.behind, "nothing more is waited for"


def test_a_page_of_the_past_that_can_bring_nothing_more_is_not_waited_for(
    words: RankWords, stream: Stream
) -> None:
    """The driver refused the write, and a thread rang in its place; or the process rang it itself."""
    stream.new_page()
    stream.ring(0, 5)
    worker = worker_words(stream.new_page())
    words.carry_over()
    assert words.streams.behind
    words.ring(0, 5)
    assert worker.load(0) == 5
    words.carry_over()
    assert not words.streams.behind


def test_what_lands_before_the_first_page_is_carried_over(words: RankWords, stream: Stream) -> None:
    with SharedBuffer.create(DOORBELLS * 8) as landing:
        stream.expose(landing)
        stream.ring(0, 3)
        stream.ring(0, 4)
        stream.land()
    worker = worker_words(stream.new_page())
    assert worker.load(0) == 3
    stream.land()
    words.carry_over()
    assert worker.load(0) == 4


def test_what_lands_between_two_sessions_is_carried_over(words: RankWords, stream: Stream) -> None:
    stream.new_page()
    stream.ring(0, 1)
    words.end_epoch()
    stream.ring(0, 2)
    stream.land(2)
    words.begin_epoch(2)
    assert worker_words(stream.new_page()).load(0) == 2


def test_a_page_that_is_closed_takes_what_is_queued(words: RankWords, stream: Stream) -> None:
    page = stream.new_page()
    stream.ring(0, 1)
    words.end_epoch()
    words.close()
    assert page.buffer.fileno() == -1
    stream.land()  # into memory that is mapped, or this process is gone


def test_a_stream_that_comes_late_does_not_take_back_what_was_rung(words: RankWords, stream: Stream) -> None:
    worker = worker_words(stream.new_page())
    stream.ring(0, 5)
    words.ring(0, 9)
    stream.land()
    assert worker.load(0) == 5
    words.carry_over()
    assert worker.load(0) == 9


def test_where_streams_cannot_write_any_more_they_are_not_asked(words: RankWords, stream: Stream) -> None:
    stream.new_page()
    stream.ring(0, 1)
    page = words.new_page()
    words.expose(page.buffer, None)
    assert words.ask(0, 2) == (True, None)
    stream.land()
    words.carry_over()
    assert worker_words(page).load(0) == 1


def test_a_doorbell_that_does_not_exist_is_refused(words: RankWords) -> None:
    for doorbell, value, field in ((DOORBELLS, 1, "doorbell"), (-1, 1, "doorbell"), (0, 2**64, "value")):
        with pytest.raises(KvtierError) as refused:
            words.ask(doorbell, value)
        assert refused.value.field == field
    assert refused.value.reason is Reason.MALFORMED


STEPS = st.lists(st.sampled_from(["ring", "ring on", "land", "page", "epoch", "carry"]), max_size=60)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_no_page_ever_says_more_than_was_reached_and_in_the_end_each_says_all(steps: list[str]) -> None:
    words = RankWords(1, PARTS)
    words.begin_epoch(1)
    stream = Stream(words, doorbells=1)
    asked, reached, epoch = 0, 0, 1
    order: list[int] = []
    worker = worker_words(stream.new_page())
    for step in steps:
        if step == "ring" and not order:
            asked += 1
            words.ring(0, asked)
            reached = asked
        elif step == "ring on":
            asked += 1
            assert stream.ring(0, asked)
            order.append(asked)
        elif step == "land" and order:
            stream.land()
            reached = max(reached, order.pop(0))
        elif step == "page":
            worker = worker_words(stream.new_page())
        elif step == "epoch":
            words.end_epoch()
            epoch += 1
            words.begin_epoch(epoch)
            worker = worker_words(stream.new_page())
        elif step == "carry":
            words.carry_over()
            assert worker.load(0) == reached
        assert worker.load(0) <= reached
    stream.land(stream.queued)
    words.carry_over()
    assert worker.load(0) == asked
    words.close()
