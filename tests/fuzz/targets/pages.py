"""Memory that another process writes: the words page, which a client may overwrite with anything, and the
index page, which a client reads while it changes."""

from __future__ import annotations

import functools
import os

import numpy as np
from kvtier.errors import KvtierError
from kvtier.session.index import Index
from kvtier_kernels import (
    PART_ARMED,
    PART_DONE,
    PART_FAILED,
    PART_REVOKED,
    PART_STARTED,
    PART_SUPERSEDED,
    TICKET_MAX,
    BlockTable,
    IndexPage,
    SharedWords,
)

from tests.fuzz.source import BORDERS, Source
from tests.fuzz.target import Target

STEPS_MAX = 64
WORDS = 4
BOOT_NONCE = 7
HASHES = np.random.default_rng(3).integers(0, 256, (64, 32), np.uint8)
KEYS = [row.tobytes() for row in HASHES]
STORED = 48
U64 = (1 << 64) - 1
HEADER_BYTES = 4096


# --- words ---


class _WordsModel:
    """What the words must do, in plain Python."""

    def __init__(self) -> None:
        self.words = [0] * WORDS

    def decide(self, index: int, ticket: int, state: int) -> bool:
        if self.words[index] >> 8 >= ticket:
            return False
        self.words[index] = ticket << 8 | state
        return True

    def state(self, index: int, ticket: int) -> int | None:
        """None for a value that no part word can have."""
        if (has := self.words[index] >> 8) != ticket:
            return PART_ARMED if has < ticket else PART_SUPERSEDED
        state = self.words[index] & 0xFF
        return state if PART_STARTED <= state <= PART_FAILED else None


def _words(source: Source) -> None:
    words, model = SharedWords(bytearray(8 * WORDS), WORDS), _WordsModel()
    for _ in range(STEPS_MAX):
        if source.is_empty:
            break
        index = source.below(WORDS)
        near = (model.words[index] >> 8) + source.below(3)
        ticket = max(1, min(source.choice((near, near, source.hostile())), TICKET_MAX))
        kind = source.below(6)
        if kind == 0:
            value = source.choice((source.hostile(), ticket << 8 | source.below(8), U64))
            words.store(index, value)
            model.words[index] = value
        elif kind == 1:
            assert words.try_start(index, ticket) == model.decide(index, ticket, PART_STARTED)
        elif kind == 2:
            expected = model.decide(index, ticket, PART_REVOKED)
            expected |= model.words[index] == ticket << 8 | PART_REVOKED
            assert words.try_revoke(index, ticket) == expected
        elif kind == 3:
            state = source.choice((PART_DONE, PART_FAILED))
            started = model.words[index] == ticket << 8 | PART_STARTED
            try:
                words.finish(index, ticket, state)
            except RuntimeError:
                assert not started
            else:
                assert started, "a part ended that had not started"
                model.words[index] = ticket << 8 | state
        elif kind == 4:
            value = source.hostile()
            words.ring(index, value)
            model.words[index] = max(model.words[index], value)
        else:
            expected_state = model.state(index, ticket)
            try:
                assert words.part_state(index, ticket) == expected_state
            except RuntimeError:
                assert expected_state is None
        assert [words.load(each) for each in range(WORDS)] == model.words


# --- index pages ---


@functools.cache
def _page() -> bytes:
    """A page as a daemon writes it, with `STORED` blocks."""
    memory = np.zeros(IndexPage.bytes_for(0) + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: IndexPage.bytes_for(0)]
    page = IndexPage(memory, BOOT_NONCE, 99)
    table = BlockTable(64, 256)
    table.publish(1, page)
    table.insert(1, 0, HASHES[:STORED].copy())
    assert table.publish_more(1, 64)
    page.complete()
    assert page.left_out == 0
    return memory.tobytes()


def _index(source: Source) -> None:
    page, changed, is_read = bytearray(_page()), False, True
    for _ in range(source.below(8)):
        field = source.flag()
        at = 8 * (
            source.below(8) if field else HEADER_BYTES // 8 + source.below((len(page) - HEADER_BYTES) // 8)
        )
        value = source.choice((source.hostile(), source.choice(BORDERS) & U64, 0))
        page[at : at + 8] = value.to_bytes(8, "little")
        changed = True
    if source.one_in(4):
        page = page[: source.hostile() % (len(page) + 1)] + bytes(source.below(128))
        changed = True
    fd = os.memfd_create("kvtier-fuzz-index", os.MFD_CLOEXEC)
    os.pwrite(fd, page, 0)
    index = Index(BOOT_NONCE, 32)
    try:
        index.add(fd)
    except KvtierError as error:
        assert changed, error
        is_read = False
    assert len(index) == is_read
    for _ in range(4):
        first, end = source.below(80), source.below(80)
        known = index.known_run(source.choice((0, 0, 1)), KEYS, first, end)
        assert known is None or 0 <= known <= max(0, min(end, len(KEYS)) - first)
        group, some = source.choice((0, 0, 1)), KEYS[min(first, end) : max(first, end)]
        each = [index.known_run(group, [key], 0, 1) for key in some]
        known_some = index.knows_any(group, some)
        assert not each or known_some == (None if None in each else 1 in each)
    if not changed:
        assert index.known_run(0, KEYS, 0, len(KEYS)) == STORED, "blocks that are there are not found"
        assert index.knows_any(0, KEYS), "blocks that are there are not found"


def run(data: bytes) -> None:
    source = Source(data)
    if source.flag():
        _words(source)
    else:
        _index(source)


TARGET = Target(
    run, ("kvtier.session.index", __name__), guides=(_words, _index), seeds=(b"\0", b"\1"), bytes_max=300
)
