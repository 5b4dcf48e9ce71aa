"""The shared words of a rank: its doorbells, and one word per part of a transfer.

A part word is `ticket << 8 | state`. A part is armed as long as its word's ticket is smaller than its own.
The copy worker moves it from armed to STARTED, and from there to DONE or FAILED. The client moves it from
armed to REVOKED. It also revokes a store that is STARTED: a store only reads the engine's memory, and what it
has read is thrown away if the worker cannot write DONE. Each of these moves is a compare-and-swap on the word
itself, so that one side wins and the daemon need not be asked.

This file guarantees the fence: a part whose `state` is over can write nothing any more, because
- its word is terminal; or
- it says STARTED, but its worker is dead, as the worker's pidfd shows; or
- its page was sealed before it started. On a sealed page every word that is not STARTED is raised to the
  highest ticket there is, so nothing can start on it, whatever the daemon does later.

A doorbell is raised by the process (`ring`) or by a stream of its GPU (`ask`, kvtier.stream_words). A new
page starts with the values that were truly reached: rung by the process, or landed on a page before it.

Like the session that owns it, it is used from one thread at a time.
"""

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import kvtier_kernels as native
import numpy as np
import numpy.typing as npt

from kvtier.errors import KvtierError, Reason
from kvtier.memory import SharedBuffer
from kvtier.stream_words import WORD_BYTES as WORD_BYTES
from kvtier.stream_words import StreamPage, StreamWords

DOORBELLS_DEFAULT = 64
PARTS_DEFAULT = 1_024
WORDS_MAX = 65_536
SEALED = native.TICKET_MAX << 8 | native.PART_REVOKED
PAGES_KEPT = 8
"""How many replaced, fenced pages are remembered, so that late questions get the true answer."""

Direction = Literal["store", "load"]


@dataclass(frozen=True, slots=True)
class Doorbell:
    """A condition for a part to start: the doorbell word `index` of its rank has reached `value`."""

    index: int
    value: int


@dataclass(frozen=True, slots=True)
class PartRef:
    """What a rank must know of a transfer that another process submitted. Plain values, to be sent to it."""

    epoch: int
    ticket: int
    word: int
    direction: Direction


class PartState(Enum):
    """The state of a part, as this rank sees it."""

    ARMED = native.PART_ARMED
    """It has not started, and may be revoked."""
    STARTED = native.PART_STARTED
    """It is being copied: only its end, or its worker's death, ends it."""
    REVOKED = native.PART_REVOKED
    """It never started and never will. Or it is a store that was withdrawn while it ran, of which nothing is
    kept."""
    DONE = native.PART_DONE
    """Every block is copied: a load has landed, or the source of a store may be reused."""
    FAILED = native.PART_FAILED
    """It ended without all blocks copied; nothing of it can still land."""
    LOST = native.PART_SUPERSEDED
    """It had not started when its epoch or page ended, or its word was given to a later transfer. Nothing of
    it can still land; treat it as failed."""

    @property
    def over(self) -> bool:
        """The fence: whether no copy of this part can still land, and none can still read."""
        return self is not PartState.ARMED and self is not PartState.STARTED


def dead(pidfd: int) -> bool:
    """Whether the process of this pidfd has exited."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class WordsPage:
    """One page of words: first the doorbells, then the part words, which one worker writes."""

    def __init__(self, epoch: int, doorbells: Sequence[int], parts: int) -> None:
        """`doorbells` are the values that the doorbells start with. Makes a memfd that is not
        registered yet."""
        self.epoch = epoch
        self.parts = parts
        self._doorbells = len(doorbells)
        self.buffer = SharedBuffer.create((self._doorbells + parts) * WORD_BYTES, "kvtier-words")
        """The page's memory, which begins with the doorbells."""
        self._words: native.SharedWords | None = native.SharedWords(
            self.buffer.array, self._doorbells + parts
        )
        for index, value in enumerate(doorbells):
            self._words.store(index, value)
        self._part_indexes = np.arange(self._doorbells, self._doorbells + parts, dtype=np.uint32)
        self._worker: int | None = None
        self._final: npt.NDArray[np.uint64] | None = None

    def adopt_worker(self, pidfd: int) -> None:
        """Takes over the pidfd of the worker that writes the part words."""
        self._drop_worker()
        self._worker = pidfd

    @property
    def worker_is_dead(self) -> bool:
        """Whether that worker has exited."""
        return self._worker is not None and dead(self._worker)

    @property
    def sealed(self) -> bool:
        """Whether the page is sealed, so that nothing can start here any more."""
        return self._final is not None

    def ring(self, doorbell: int, value: int) -> None:
        """Raises a doorbell."""
        if self._words is not None:
            self._words.ring(doorbell, value)

    def withdraw(self, word: int, ticket: int) -> None:
        """Marks a part as revoked on a page that is not registered yet."""
        assert self._words is not None
        self._words.store(self._doorbells + word, ticket << 8 | native.PART_REVOKED)

    def state(self, word: int, ticket: int) -> PartState | None:
        """Returns the part's state on this page, or None if it has not started here and never can."""
        found = self._read(word, ticket)
        if found is PartState.STARTED and self.worker_is_dead:
            found = self._read(word, ticket)  # the worker may have written the end just before it died
            if found is PartState.STARTED:
                return PartState.FAILED
        if found is PartState.ARMED and self.sealed and self.worker_is_dead:
            return None
        return found

    def revoke(self, word: int, ticket: int, *, started: bool) -> PartState | None:
        """Moves the part from armed, and with `started` also from STARTED, to REVOKED. Returns its state."""
        index = self._doorbells + word
        if self._words is not None and self._final is None:
            self._words.try_revoke(index, ticket)
        if self._words is not None and started:
            self._words.compare_exchange(
                index, ticket << 8 | native.PART_STARTED, ticket << 8 | native.PART_REVOKED
            )
        return self.state(word, ticket)

    def seal(self) -> None:
        """Seals the page: from now on nothing starts on it. What is STARTED runs on, what is over stays
        known.

        A second call seals the words of parts that have ended since; until then, a word that was STARTED
        could take one more part.
        """
        if self._words is None:
            return
        if self._final is None:
            self._final = np.zeros(self.parts, np.uint64)
        for part in np.flatnonzero(self._words.load_many(self._part_indexes) != np.uint64(SEALED)):
            self._seal_word(int(part))

    def started(self) -> int:
        """Returns the number of parts that are STARTED while their worker lives. If it is 0 on a sealed page,
        all of the page is fenced for good."""
        if self._words is None or self.worker_is_dead:
            return 0
        if self.sealed:
            self.seal()
        words = self._words.load_many(self._part_indexes)
        return int(np.count_nonzero(words & np.uint64(0xFF) == native.PART_STARTED))

    def retire(self) -> None:
        """Unmaps a sealed page whose `started` is 0. The states of its parts stay known."""
        if self._words is None:
            return
        assert self._final is not None
        for part in range(self.parts):
            value = self._words.load(self._doorbells + part)
            if value != SEALED:  # its worker died while it copied
                state = native.PART_FAILED if value & 0xFF == native.PART_STARTED else value & 0xFF
                self._final[part] = value & ~0xFF | state
        self.close()

    def close(self) -> None:
        """Gives memory and descriptors back."""
        self._words = None
        self.buffer.close()
        self._drop_worker()

    def _seal_word(self, part: int) -> int:
        """Seals one word unless it says STARTED. Returns its value afterwards."""
        assert self._words is not None
        assert self._final is not None
        index = self._doorbells + part
        while (value := self._words.load(index)) != SEALED and value & 0xFF != native.PART_STARTED:
            self._final[part] = value
            if self._words.compare_exchange(index, value, SEALED):
                return SEALED
        return value

    def _read(self, word: int, ticket: int) -> PartState | None:
        if self._final is None:
            assert self._words is not None
            value = self._words.load(self._doorbells + word)
            sealed = False
        else:
            value = SEALED if self._words is None else self._seal_word(word)
            sealed = value == SEALED
            value = int(self._final[word]) if sealed else value
        if value >> 8 < ticket:
            return None if sealed else PartState.ARMED
        if value >> 8 > ticket:
            return PartState.LOST
        state = value & 0xFF
        if not native.PART_STARTED <= state <= native.PART_FAILED:
            return PartState.STARTED  # no worker writes such a word, so assume that the copy goes on
        return PartState(state)

    def _drop_worker(self) -> None:
        if self._worker is not None:
            os.close(self._worker)
            self._worker = None


_DECISIVE = (
    PartState.STARTED,
    PartState.DONE,
    PartState.FAILED,
    PartState.REVOKED,
    PartState.LOST,
    PartState.ARMED,
)
"""If a part has states on several pages, the first of these counts."""


class RankWords:
    """All pages of one rank: the one in use, and replaced ones whose parts may still be asked for."""

    def __init__(self, doorbells: int, parts: int) -> None:
        """`doorbells` and `parts` are the words on every page. Raises KvtierError if out of range."""
        for field, value, least in (("doorbells", doorbells, 0), ("parts", parts, 1)):
            if not least <= value <= WORDS_MAX:
                message = f"must be between {least} and {WORDS_MAX}"
                raise KvtierError(Reason.WORD_INDEX_RANGE, message, field=field, value=value)
        self._parts = parts
        self._doorbells = [0] * doorbells  # values reached, as far as is known here
        self.streams = StreamWords(doorbells)
        """What the streams of a GPU write."""
        self._pages: list[WordsPage] = []  # oldest first
        self._epoch: int | None = None
        self._withdrawn: dict[int, int] = {}  # word -> ticket revoked in this epoch

    def begin_epoch(self, epoch: int) -> None:
        """Notes that the session of this epoch is attached."""
        if epoch != self._epoch:
            self.end_epoch()
            self._epoch = epoch

    def end_epoch(self) -> None:
        """Notes that the session is over: nothing of its epoch can start from now on."""
        self._epoch = None
        self._withdrawn.clear()
        self.seal()

    def seal(self) -> None:
        """Seals all pages: nothing starts on them any more. The epoch may get another page."""
        for page in self._pages:
            page.seal()
        self.reap()

    def new_page(self) -> WordsPage:
        """Makes a page for the current epoch, to be registered now, and seals the pages before it.

        It starts with the doorbells as they are, and with the parts that were revoked in this epoch.
        """
        assert self._epoch is not None
        self.carry_over()
        self.seal()
        page = WordsPage(self._epoch, self._doorbells, self._parts)
        for word, ticket in self._withdrawn.items():
            page.withdraw(word, ticket)
        self._pages.append(page)
        return page

    def ring(self, doorbell: int, value: int) -> None:
        """Raises a doorbell here and on pages to come. Raises KvtierError for an unknown doorbell."""
        self._check_ring(doorbell, value)
        if value > self._doorbells[doorbell]:
            self._doorbells[doorbell] = value
            if self._pages:
                self._pages[-1].ring(doorbell, value)

    def ask(self, doorbell: int, value: int) -> tuple[bool, int | None]:
        """Prepares a stream to raise a doorbell. Returns whether the stream has to be asked at all, and the
        address on the GPU to write, or None if there is none. Raises KvtierError as `ring`."""
        self._check_ring(doorbell, value)
        if value <= max(self._doorbells[doorbell], self.streams.asked(doorbell)):
            return False, None
        return True, self.streams.ask(doorbell, value)

    def expose(self, buffer: SharedBuffer, device_address: int | None) -> None:
        """From now on streams write the doorbells at the start of this buffer; with None they cannot write
        any."""
        page = None
        if device_address is not None:
            page = StreamPage(buffer, len(self._doorbells), device_address)
        self.streams.use(page)

    def carry_over(self) -> None:
        """Copies what streams have written, on whichever page it landed, to the page in use; and raises a
        word again that a later stream has set to less than was reached."""
        for doorbell, value in enumerate(self.streams.landed()):
            if value != self._doorbells[doorbell]:
                self._doorbells[doorbell] = reached = max(value, self._doorbells[doorbell])
                if self._pages:
                    self._pages[-1].ring(doorbell, reached)
        self.streams.forget(self._doorbells)

    def state(self, ref: PartRef) -> PartState:
        """Returns the state of a part. Changes nothing. Raises KvtierError for a word that does not exist."""
        self._check(ref)
        states = [page.state(ref.word, ref.ticket) for page in self._pages if page.epoch == ref.epoch]
        return self._judge(ref, states)

    def revoke(self, ref: PartRef) -> PartState:
        """Ends a part for good if it has not started, and a store's part also while it runs. Returns its
        state afterwards: over, or STARTED."""
        self._check(ref)
        if ref.epoch == self._epoch and ref.ticket > self._withdrawn.get(ref.word, 0):
            self._withdrawn[ref.word] = ref.ticket
        started = ref.direction == "store"
        states = [
            page.revoke(ref.word, ref.ticket, started=started)
            for page in self._pages
            if page.epoch == ref.epoch
        ]
        return self._judge(ref, states)

    def started(self) -> int:
        """Returns the number of STARTED parts whose workers live, on all pages."""
        return sum(page.started() for page in self._pages)

    def reap(self) -> None:
        """Gives the memory of replaced pages back that are fenced, and forgets the oldest of them."""
        past = [page for page in self._pages if page.sealed]
        fenced = [page for page in past if page.started() == 0]
        for page in fenced:
            page.retire()
        for page in fenced[:-PAGES_KEPT]:
            self._pages.remove(page)

    def close(self) -> None:
        """Unmaps all pages and leaves their words as they are, because the pages of a forked child are its
        parent's."""
        for page in self._pages:
            page.close()
        self._pages.clear()
        self.streams.clear()

    def _check_ring(self, doorbell: int, value: int) -> None:
        if not 0 <= doorbell < len(self._doorbells):
            message = f"this client has {len(self._doorbells)} doorbells"
            raise KvtierError(Reason.WORD_INDEX_RANGE, message, field="doorbell", value=doorbell)
        if not 0 <= value < 2**64:
            raise KvtierError(Reason.MALFORMED, "must fit 64 bits", field="value", value=value)

    def _check(self, ref: PartRef) -> None:
        if not 0 <= ref.word < self._parts:
            message = f"this client has {self._parts} part words; submitter and ranks must agree on it"
            raise KvtierError(Reason.WORD_INDEX_RANGE, message, field="word", value=ref.word)
        if not 0 < ref.ticket < native.TICKET_MAX:
            raise KvtierError(Reason.MALFORMED, "must be below 2^56 - 1", field="ticket", value=ref.ticket)

    def _judge(self, ref: PartRef, states: list[PartState | None]) -> PartState:
        """Returns the state that counts. At most one page ever starts a part, because the daemon posts it
        once."""
        for decisive in _DECISIVE:
            if decisive in states:
                return decisive
        if ref.epoch != self._epoch:
            return PartState.LOST  # its pages are sealed, or it never had any
        # Between two pages of an epoch an armed part may still start on the next one, unless it was revoked.
        return PartState.REVOKED if self._withdrawn.get(ref.word) == ref.ticket else PartState.ARMED
