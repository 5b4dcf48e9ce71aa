"""The writer table of a pool file: which process the writer id in a slot record stands for.

Entries of 32 bytes from the file's second page on: pid (u32), checksum (u32, crc32 of the other 28 bytes),
start ticks, boot, pid namespace (u64 each). Entry 0 is the front that owns the pool, and writers have the
others.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.memory.processes import ProcessName, kernel_boot, name_process, pid_namespace, proved_gone

ENTRY = np.dtype(
    [("pid", "<u4"), ("checksum", "<u4"), ("start", "<u8"), ("boot", "<u8"), ("namespace", "<u8")]
)
TABLE_OFFSET = 4096
TABLE_BYTES = (2 << 20) - TABLE_OFFSET
OWNER = 0
PID_MAX = 2**31 - 1
"""The largest pid that can be asked about. An entry with another is damaged, whatever its checksum."""


def _checksum(name: ProcessName) -> int:
    fields = np.array([(name.pid, 0, name.start_ticks, name.boot, name.namespace)], dtype=ENTRY).tobytes()
    return zlib.crc32(fields[:4] + fields[8:])


def _read(entries: npt.NDArray[Any], index: int) -> ProcessName | None:
    pid, checksum, start, boot, namespace = entries[index].tolist()
    name = ProcessName(pid, start, boot, namespace)
    return name if 0 < pid <= PID_MAX and checksum == _checksum(name) else None


def living(table: bytes) -> list[int]:
    """Pids of the owner and writers in a copy of the table that can be seen here and are not proved to be
    gone."""
    entries = np.frombuffer(table, dtype=ENTRY)
    names = [_read(entries, index) for index in np.flatnonzero(entries["pid"]).tolist()]
    seen = {name for name in names if name and name.namespace == pid_namespace()}
    return sorted({name.pid for name in seen if not proved_gone(name)})


class WriterTable:
    """The table in the pool file. Only the process that holds the pool's lock changes it."""

    def __init__(self, pool: npt.NDArray[np.uint8], named_by_slots: Callable[[], Iterable[int]]) -> None:
        """`named_by_slots` lists the writers that WRITING slots name; these keep their ids."""
        self._entries = pool[TABLE_OFFSET : TABLE_OFFSET + TABLE_BYTES].view(ENTRY)
        self._named_by_slots = named_by_slots
        self._next = OWNER + 1
        last_owner = _read(self._entries, OWNER)
        self._kernel_rebooted = last_owner is not None and last_owner.boot != kernel_boot()

    @property
    def capacity(self) -> int:
        """One more than the highest writer id."""
        return len(self._entries)

    def set_owner(self, pid: int) -> None:
        """Names the daemon that owns the pool. Raises ValueError if there is no such process."""
        self._write(OWNER, name_process(pid))

    def register(self, pid: int) -> int:
        """Gives a living process a writer id. Raises ValueError if there is no such process, or no id
        left."""
        name = name_process(pid)
        named: set[int] | None = None
        for step in range(self.capacity - 1):
            writer = OWNER + 1 + (self._next - 1 + step) % (self.capacity - 1)
            if self._entries["pid"][writer]:
                if not self.gone(writer):
                    continue
                named = set(self._named_by_slots()) if named is None else named
                if writer in named:
                    continue
            self._next = writer + 1
            self._write(writer, name)
            return writer
        raise ValueError(
            f"no writer id left: all {self.capacity - 1} belong to living processes or are named by slots"
        )

    def gone(self, writer: int) -> bool:
        """Whether the process that had this id is proved to be gone. If the table does not know the id, only
        a boot of the kernel since the pool was last opened proves that."""
        name = _read(self._entries, writer) if OWNER < writer < self.capacity else None
        return self._kernel_rebooted if name is None else proved_gone(name)

    def foreign(self, writers: npt.NDArray[np.uint16]) -> list[int]:
        """Those of `writers` whose processes cannot be seen from here: of other pid namespaces, or
        unknown."""
        found = []
        for writer in np.unique(writers).tolist():
            name = _read(self._entries, writer) if OWNER < writer < self.capacity else None
            if name is None or name.namespace != pid_namespace():
                found.append(writer)
        return found

    def sweep(self, named: Iterable[int]) -> None:
        """Forgets writers that are gone, except those that WRITING slots still name. Call it right after
        taking the pool's lock: a writer of another pid namespace has then given the lock up, and counts as
        gone."""
        kept = {OWNER, *named}
        for writer in np.flatnonzero(self._entries["pid"]).tolist():
            name = _read(self._entries, writer)
            if writer in kept:
                continue
            if name is None or name.namespace != pid_namespace() or proved_gone(name):
                self._entries["pid"][writer] = 0
                self._entries["checksum"][writer] = 0

    def _write(self, writer: int, name: ProcessName) -> None:
        entries = self._entries
        entries["checksum"][writer] = 0  # an entry half written must not be believed
        entries["pid"][writer] = name.pid
        entries["start"][writer] = name.start_ticks
        entries["boot"][writer] = name.boot
        entries["namespace"][writer] = name.namespace
        entries["checksum"][writer] = _checksum(name)
