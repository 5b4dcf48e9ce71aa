"""What a worker has mapped of each session: the shared words, and the engine's memory."""

import fcntl
import gc
import mmap
import os
import stat
from dataclasses import dataclass, field

import numpy as np
from kvtier_kernels import PART_FAILED, PART_REVOKED, TICKET_MAX, CopyPlan, SharedWords

from kvtierd.core.errors import Reason, Refusal
from kvtierd.transfer.worker.parts import Part
from kvtierd.wire import worker_pb2 as wire

SEALED = TICKET_MAX << 8 | PART_REVOKED
"""What a client raises its words to when nothing may start on their page any more."""

WORDS_MAX = 1 << 20
"""Words of one session: 8 MiB. A transfer in flight needs one part word."""

REGISTRATIONS_MAX = 16
"""Of one session."""


@dataclass(slots=True, eq=False)
class Session:
    """Everything that is mapped for one session, and its unfinished parts. Guarded by the engine's lock.

    The words are memory that a client can write whatever it likes to: every use of them here says what then
    happens.
    """

    number: int
    doorbells: int = 0
    parts: int = 0
    """Number of part words."""
    words: SharedWords | None = None
    plans: dict[tuple[int, int], CopyPlan] = field(default_factory=dict)
    """By registration and group."""
    registrations: set[int] = field(default_factory=set)
    mappings: list[mmap.mmap] = field(default_factory=list)
    unfinished: set[Part] = field(default_factory=set)
    releases: int = 0
    """Times its release was asked for; from the first on it takes no more."""
    is_fenced: bool = False
    """Nothing of it can run any more: it is being unmapped."""
    overwritten_words: int = 0
    """Part words that did not say what only this worker may change."""

    def load_word(self, index: int) -> int:
        return 0 if self.words is None else self.words.load(index)

    def try_start(self, part: Part) -> bool:
        """The part's word from armed to STARTED; False if the part must not run."""
        return self.words is not None and self.words.try_start(part.word, part.ticket)

    def is_revoked(self, part: Part) -> bool:
        """True if the part's word says that its client has revoked it."""
        try:
            return self.words is None or self.words.part_state(part.word, part.ticket) == PART_REVOKED
        except RuntimeError:
            # No value that anybody may have written. The part shows it when it tries to start.
            return False

    def revoke(self, part: Part) -> bool:
        """Writes REVOKED for a part that has not been started; False if its word had been overwritten. A
        sealed word says REVOKED already."""
        return self._try_revoke(part.word, part.ticket)

    def revoke_word(self, part_word: int, ticket: int) -> None:
        """Writes REVOKED for a part that was refused; nothing if it names no word of this session."""
        if part_word < self.parts and 0 < ticket <= TICKET_MAX:
            self._try_revoke(self.doorbells + part_word, ticket)

    def finish(self, part: Part, state: int = PART_FAILED) -> bool:
        """Writes the terminal word of a started part; False if its word had been overwritten, and is left so:
        by the client, which may withdraw a store that runs, or by somebody else."""
        try:
            if self.words is not None:
                self.words.finish(part.word, part.ticket, state)
        except RuntimeError:
            if part.is_load or not self.is_revoked(part):
                self._noted(False)
            return False
        return True

    def _try_revoke(self, word: int, ticket: int) -> bool:
        if self.words is None or self.words.try_revoke(word, ticket):
            return True
        return self._noted(self.words.load(word) == SEALED)

    def _noted(self, as_expected: bool) -> bool:
        if not as_expected:
            self.overwritten_words += 1
        return as_expected

    def map_words(self, fd: int, doorbells: int, parts: int) -> None:
        """Maps the words. Refusal, and nothing changed, if they cannot be. The descriptor stays the
        caller's."""
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
        mapping = _map(fd, 8 * (doorbells + parts))
        self.mappings.append(mapping)
        self.words = SharedWords(mapping, doorbells + parts)
        self.doorbells = doorbells
        self.parts = parts

    def map_memory(self, fd: int, message: wire.MapMemory) -> None:
        """Maps a rank's memory. Refusal, and nothing changed, if it is not what the message says."""
        if message.registration in self.registrations:
            raise Refusal(
                Reason.ALREADY_REGISTERED,
                "this registration is mapped already",
                field="registration",
                value=message.registration,
            )
        if len(self.registrations) >= REGISTRATIONS_MAX:
            raise Refusal(
                Reason.ALREADY_REGISTERED,
                f"a session has at most {REGISTRATIONS_MAX} registrations",
                field="registration",
                value=message.registration,
            )
        mapping = _map(fd, message.mapping_bytes)
        plans = {}
        try:
            for group in message.groups:
                plans[message.registration, group.group] = _plan(mapping, message.mapping_bytes, group)
        except BaseException:
            plans.clear()
            _unmap(mapping)
            raise
        self.plans.update(plans)
        self.mappings.append(mapping)
        self.registrations.add(message.registration)

    def fence(self) -> None:
        """Drops what uses the mappings; no part may be left."""
        self.is_fenced = True
        self.words = None
        self.plans.clear()

    def unmap(self) -> None:
        """Unmaps everything, after `fence`. Without the engine's lock: much memory takes a while.

        RuntimeError if something still holds a mapping: then only the end of the process helps.
        """
        while self.mappings:
            _unmap(self.mappings.pop())


def _map(fd: int, length: int) -> mmap.mmap:
    """Maps the first `length` bytes of a memfd that cannot shrink; a truncated one would be the worker's
    death."""
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
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"the memfd has {status.st_size} bytes",
            field="mapping_bytes",
            value=length,
        )
    # Whole pages of the file: munmap takes no part of a huge page.
    whole = min(-(-length // status.st_blksize) * status.st_blksize, status.st_size)
    try:
        return mmap.mmap(fd, whole)
    except (OSError, ValueError, OverflowError) as error:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"the memfd cannot be mapped: {error}",
            field="mapping_bytes",
            value=length,
        ) from None


def _plan(mapping: mmap.mmap, mapping_bytes: int, group: wire.MappedGroup) -> CopyPlan:
    try:
        return CopyPlan(
            memoryview(mapping)[:mapping_bytes],
            np.array(group.base_offsets, np.uint64),
            np.array(group.block_strides, np.uint64),
            np.array(group.fragment_bytes, np.uint64),
            group.num_blocks,
        )
    except (ValueError, OverflowError) as error:
        raise Refusal(
            Reason.PLANE_BEYOND_MAPPING, str(error), field=f"groups[{group.group}]", value=group.num_blocks
        ) from None


def _unmap(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        # Something in a reference cycle, an exception's traceback for one, still holds a view.
        gc.collect()
        try:
            mapping.close()
        except BufferError as error:
            raise RuntimeError(f"a session's mapping is still in use: {error}") from error
