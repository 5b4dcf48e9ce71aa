"""Moves slots between the pool and a slab that is encrypted. The order of steps is that of `moving.py`."""

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtierd.core.ids import PAGE_BYTES
from kvtierd.workers.disk.jobs import U64, Rows, SlotJob
from kvtierd.workers.disk.moving import Bytes, Mover, in_pages, pair
from kvtierd.workers.disk.slot_cipher import TAG_BYTES, SlotCipher

STAGING_BYTES = 8 << 20
"""Memory of each thread for ciphertext; as much is encrypted before it is written, and read before it is
decrypted. A slot that is larger gets memory of its own while it is moved."""


class EncryptedMover(Mover):
    """As a `Mover`, for a slab that is encrypted: what is written is encrypted from the pool into memory of
    the thread's own, and what is read is decrypted from there."""

    def __init__(self, cipher: SlotCipher, **arguments: Any) -> None:
        """`arguments` are those of `Mover`."""
        super().__init__(**arguments)
        self._cipher = cipher
        self._staging: Bytes = np.frombuffer(mmap.mmap(-1, STAGING_BYTES), np.uint8)

    # --- the three kinds ---

    def _write(self, job: SlotJob, rows: Rows) -> None:
        rows = self._keep(job, rows, self._disk.match(*pair(job, rows, self._host)))
        claimed, records = self._cipher.claim(job.disk_slots[rows], job.disk_generations[rows])
        job.fail(rows[~claimed])
        rows, records = rows[claimed], records[claimed]
        kept = self._persist(job, rows)
        rows, records = kept, records[np.isin(rows, kept)]
        for first, end in self._pieces(job, rows):
            self._write_piece(job, rows[first:end], records[first:end])

    def _write_piece(self, job: SlotJob, rows: Rows, records: U64) -> None:
        sums, there = self._host.data_sums(job.host_slots[rows], job.host_generations[rows])
        job.fail(rows[there == 0])
        rows, records, sums = rows[there == 1], records[there == 1], sums[there == 1]
        if not len(rows):
            return
        sizes = self._disk.data_bytes(job.disk_slots[rows])
        staging, places = self._places(sizes)
        with _timed(job):
            masked, tags = self._cipher.encrypt(
                job.disk_slots[rows],
                job.disk_generations[rows],
                records,
                sums,
                self._pool,
                _spans(job.host_slots[rows].astype(np.uint64) * np.uint64(PAGE_BYTES), sizes),
                staging,
                places.tolist(),
            )
            for (begin, size), length in zip(_spans(places, sizes), in_pages(sizes).tolist(), strict=True):
                staging[begin + size : begin + length] = 0
        written = self._write_data(job, rows, staging, places // np.uint64(PAGE_BYTES))
        kept = np.isin(rows, written)
        rows, masked, tags, sums = written, masked[kept], tags[kept], sums[kept]
        # If the host's block is still there, its bytes are what was encrypted, as for a slab in plain.
        same = self._disk.match(*pair(job, rows, self._host)) == 1
        rows, masked, tags = self._keep(job, rows, same.astype(np.uint8)), masked[same], tags[same]
        slots = job.disk_slots[rows]
        self._disk.set_tags(slots, job.disk_generations[rows], masked, tags)
        self._disk.commit(slots, job.clocks[rows])
        self._persist(job, rows)

    def _read(self, job: SlotJob, rows: Rows) -> None:
        matching = self._host.match(*pair(job, rows, self._disk)) == 1
        self._blame(job, rows[~matching])
        rows = rows[matching]
        for first, end in self._pieces(job, rows):
            piece = rows[first:end]
            places = job.host_slots[piece].astype(np.uint64) * np.uint64(PAGE_BYTES)
            opened, sums = self._open(job, piece, self._pool, places)
            same = self._host.match(*pair(job, opened, self._disk)) == 1
            self._blame(job, opened[~same])
            opened, sums = opened[same], sums[same]
            self._host.set_data_checksums(job.host_slots[opened], job.host_generations[opened], sums)

    def _check(self, job: SlotJob, rows: Rows) -> None:
        good = self._disk.check(job.disk_slots[rows], job.disk_generations[rows]) == 1
        self._blame(job, rows[~good])
        rows = rows[good]
        for first, end in self._pieces(job, rows):
            piece = rows[first:end]
            sizes = in_pages(self._disk.data_bytes(job.disk_slots[piece]))
            self._open(job, piece, self._memory(int(sizes.sum())), np.cumsum(sizes) - sizes)

    # --- their steps ---

    def _open(self, job: SlotJob, rows: Rows, plain: Bytes, places: U64) -> tuple[Rows, U64]:
        """Reads and decrypts rows of READY slots into `plain`, at these places. Returns those that are
        exactly what was stored, and their checksums. The others fail, or are corrupt if their slots are still
        the same."""
        records = self._disk.copies(job.disk_slots[rows])
        sizes = self._disk.data_bytes(job.disk_slots[rows])
        staging, cipher_places = self._places(sizes)
        pages = cipher_places // np.uint64(PAGE_BYTES)
        read, _ = self._read_data(job, rows, staging, pages, to_sum=False)
        kept = np.isin(rows, read)
        slots, generations = job.disk_slots[read], job.disk_generations[read]
        with _timed(job):
            good, sums = self._cipher.decrypt(
                slots,
                generations,
                records[kept],
                staging,
                _spans(cipher_places[kept], sizes[kept]),
                plain,
                places[kept].tolist(),
            )
        wrong = read[~good]
        still = self._disk.check(job.disk_slots[wrong], job.disk_generations[wrong]) == 1
        job.corrupt.append(wrong[still])
        job.fail(wrong[~still])
        return read[good], sums[good]

    def _pieces(self, job: SlotJob, rows: Rows) -> Iterator[tuple[int, int]]:
        """Cuts rows into runs that fit into the thread's memory together, at least one row each."""
        taken = self._taken(self._disk.data_bytes(job.disk_slots[rows])).tolist()
        first, total = 0, 0
        for row, size in enumerate(taken):
            if row > first and total + size > STAGING_BYTES:
                yield first, row
                first, total = row, 0
            total += size
        if taken:
            yield first, len(taken)

    def _places(self, sizes: U64) -> tuple[Bytes, U64]:
        """Memory for ciphertext of so many bytes, each with its tag behind it, and where each begins."""
        taken = self._taken(sizes)
        whole = int(taken.sum())
        staging = self._staging
        if whole > STAGING_BYTES:
            staging = np.frombuffer(mmap.mmap(-1, whole), np.uint8)
        return staging, np.cumsum(taken) - taken

    @staticmethod
    def _taken(sizes: U64) -> U64:
        return in_pages(sizes + np.uint64(TAG_BYTES))


def _spans(places: U64, sizes: U64) -> list[tuple[int, int]]:
    return list(zip(places.tolist(), sizes.tolist(), strict=True))


@contextmanager
def _timed(job: SlotJob) -> Iterator[None]:
    """Counts the time for the job, as that of the disk: blocks come as fast as both together allow."""
    began_ns = time.monotonic_ns()
    yield
    job.busy_ns += time.monotonic_ns() - began_ns
