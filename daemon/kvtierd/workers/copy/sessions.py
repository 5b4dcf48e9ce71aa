"""What a worker has mapped of each session: the shared words and the engine's memory."""

import fcntl
import gc
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtier_kernels import PART_REVOKED, TICKET_MAX, SharedWords

from kvtierd.core.errors import Reason, Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.memory import Chunk, FragmentPlan, MappedMemory, MemoryMapper

SEALED = TICKET_MAX << 8 | PART_REVOKED
"""The value to which a client sets its words when nothing may start on their page any more."""

WORDS_MAX = 1 << 20
"""Words of one session: 8 MiB. A transfer in flight needs one part word."""

REGISTRATIONS_MAX = 16
"""Registrations of one session."""

CHUNKS_MAX = 65_536
"""Chunks of one session that are not registered yet: more than 1 TiB of torch's expandable segments."""


@dataclass(slots=True, eq=False)
class MappedSession:
    """Everything that is mapped for one session.

    The main thread maps. The thread that unmaps comes when nothing else uses the session. Between the two,
    the engine's lock guards what both lanes use.

    The words are memory to which a client can write anything, so every method that uses them says what then
    happens. `word` is the index of a part word among all words, doorbells included.
    """

    number: int
    doorbells: int = 0
    parts: int = 0
    """How many part words there are."""
    tenant: int = 0
    """The tag of the tenant that it belongs to."""
    words: SharedWords | None = None
    words_mapping: mmap.mmap | None = None
    plans: dict[tuple[int, int], FragmentPlan] = field(default_factory=dict)
    """By registration and group."""
    memories: dict[int, MappedMemory] = field(default_factory=dict)
    """By registration."""
    chunks: list[Chunk] = field(default_factory=list)
    """Chunks that were added, and not yet used up by a registration."""
    unfinished: int = 0
    """How many of its parts were posted and are not over. While there are any, nothing may be unmapped."""
    releases: int = 0
    """How often its release was asked for. From the first time on, it takes nothing more."""
    is_fenced: bool = False
    """Nothing of it can run any more, and it is being unmapped."""
    overwritten_words: int = 0
    """How many part words did not have the value that only this worker may change."""

    def load_word(self, index: int) -> int:
        return 0 if self.words is None else self.words.load(index)

    def try_start(self, word: int, ticket: int) -> bool:
        """Moves a part's word from armed to STARTED. False if the part must not run."""
        return self.words is not None and self.words.try_start(word, ticket)

    def is_revoked(self, word: int, ticket: int) -> bool:
        """True if a part's word says that its client has revoked it."""
        try:
            return self.words is None or self.words.part_state(word, ticket) == PART_REVOKED
        except RuntimeError:
            # Nobody may have written this value. That shows when the part tries to start.
            return False

    def revoke(self, word: int, ticket: int) -> bool:
        """Writes REVOKED for a part that has not started. False if its word had been overwritten. A sealed
        word already means REVOKED."""
        if self.words is None or self.words.try_revoke(word, ticket):
            return True
        return self._noted(self.words.load(word) == SEALED)

    def revoke_word(self, part_word: int, ticket: int) -> None:
        """Writes REVOKED for a part that was refused. Does nothing if it names no word of this session."""
        if part_word < self.parts and 0 < ticket <= TICKET_MAX:
            self.revoke(self.doorbells + part_word, ticket)

    def finish(self, word: int, ticket: int, state: int, *, is_load: bool) -> bool:
        """Writes the terminal word of a started part. False if the word had been overwritten, by the client,
        which may withdraw a running store, or by anything else; it is then left as it is."""
        try:
            if self.words is not None:
                self.words.finish(word, ticket, state)
        except RuntimeError:
            if is_load or not self.is_revoked(word, ticket):
                self._noted(False)
            return False
        return True

    def _noted(self, as_expected: bool) -> bool:
        if not as_expected:
            self.overwritten_words += 1
        return as_expected

    def map_words(self, fd: int, doorbells: int, parts: int) -> None:
        """Maps the words. The descriptor stays the caller's. Raises Refusal if they cannot be mapped, and
        then nothing has changed."""
        if self.words is not None:
            raise Refusal(
                Reason.ALREADY_REGISTERED,
                "this session's words are mapped already",
                field="session",
                value=self.number,
            )
        if not 0 < doorbells + parts <= WORDS_MAX:
            raise Refusal(
                Reason.MAPPING_INVALID,
                f"use 1 to {WORDS_MAX} words in all",
                field="words",
                value=doorbells + parts,
            )
        mapping = map_memfd(fd, 8 * (doorbells + parts))
        self.words_mapping = mapping
        self.words = SharedWords(mapping, doorbells + parts)
        self.doorbells = doorbells
        self.parts = parts

    def add_chunks(self, mapper: MemoryMapper, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """Imports chunks for the next registration. The descriptors stay the caller's. Raises Refusal if one
        cannot be imported, and then nothing has changed."""
        if len(self.chunks) + len(fds) > CHUNKS_MAX:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"a session adds at most {CHUNKS_MAX} chunks before it registers them",
                field="chunks",
                value=len(self.chunks) + len(fds),
            )
        added: list[Chunk] = []
        try:
            for fd, size_bytes in zip(fds, sizes, strict=True):
                added.append(mapper.import_chunk(fd, size_bytes))
        except BaseException:
            for chunk in added:
                chunk.release()
            raise
        self.chunks += added

    def map_memory(self, mapper: MemoryMapper, fds: Sequence[int], message: wire.MapMemory) -> None:
        """Maps a rank's memory. Raises Refusal if it is not what the message says, and then nothing has
        changed.

        Call it without the engine's lock, because much memory takes a while.
        """
        refusal = partial(Refusal, field="registration", value=message.registration)
        if message.registration in self.memories:
            raise refusal(Reason.ALREADY_REGISTERED, "this registration is mapped already")
        if len(self.memories) >= REGISTRATIONS_MAX:
            raise refusal(
                Reason.ALREADY_REGISTERED, f"a session has at most {REGISTRATIONS_MAX} registrations"
            )
        memory, chunks_used = mapper.map_memory(message, fds, self.chunks)
        plans: dict[tuple[int, int], FragmentPlan] = {}
        try:
            for group in message.groups:
                plans[message.registration, group.group] = memory.plan(group)
        except BaseException:
            plans.clear()
            memory.unmap()
            raise
        used, self.chunks = self.chunks[:chunks_used], self.chunks[chunks_used:]
        for chunk in used:
            chunk.release()
        self.memories[message.registration] = memory
        self.plans.update(plans)

    def fence(self) -> None:
        """Drops everything that uses the mappings. No part may be left."""
        self.is_fenced = True
        self.words = None
        self.plans.clear()

    def unmap(self) -> None:
        """Unmaps everything, after `fence`. Call it without the engine's lock, because much memory takes a
        while.

        Raises if something cannot be unmapped; then only the end of the process helps.
        """
        while self.memories:
            self.memories.popitem()[1].unmap()
        while self.chunks:
            self.chunks.pop().release()
        if self.words_mapping is not None:
            unmap(self.words_mapping)
            self.words_mapping = None


def map_memfd(fd: int, length: int) -> mmap.mmap:
    """Maps the first `length` bytes of a memfd that cannot shrink, because access to a truncated one would
    kill the worker. Raises Refusal if the descriptor is not such a memfd."""
    refusal = partial(Refusal, field="mapping_bytes", value=length)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        status = os.fstat(fd)
    except OSError as error:
        raise Refusal(
            Reason.MAPPING_INVALID, f"the descriptor is no memfd: {error}", field="descriptor", value=fd
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise Refusal(Reason.MAPPING_INVALID, "the descriptor is no memfd", field="descriptor", value=fd)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise Refusal(
            Reason.MAPPING_NOT_SEALED,
            "seal the memfd with F_SEAL_SHRINK before it is registered",
            field="seals",
            value=hex(seals),
        )
    if not 0 < length <= status.st_size:
        raise refusal(Reason.MAPPING_INVALID, f"the memfd has {status.st_size} bytes")
    # Whole pages of the file are mapped, because munmap takes no part of a huge page.
    whole = min(-(-length // status.st_blksize) * status.st_blksize, status.st_size)
    try:
        return mmap.mmap(fd, whole)
    except (OSError, ValueError, OverflowError) as error:
        raise refusal(Reason.MAPPING_INVALID, f"the memfd cannot be mapped: {error}") from None


def unmap(mapping: mmap.mmap) -> None:
    """Unmaps. Raises RuntimeError if something still uses the mapping; then only the end of the process
    helps."""
    try:
        mapping.close()
    except BufferError:
        # Something in a reference cycle, such as an exception's traceback, still holds a view.
        gc.collect()
        try:
            mapping.close()
        except BufferError as error:
            raise RuntimeError(f"a session's mapping is still in use: {error}") from error
