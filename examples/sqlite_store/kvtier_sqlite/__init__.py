"""A store for kvtier in a SQLite file: `store.url = "sqlite:///srv/kvtier/blocks.db"`.

SQLite's locks need a file system of one machine, so this is for several daemons there. It is also what a
driver for kvtier consists of: a function that opens a store, five calls, and errors as StoreError.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from kvtierd.tiers.store.objects import Listed, Piece, StoreError, StoreTrouble

THREADS = 8
_TABLE = "CREATE TABLE IF NOT EXISTS objects (name TEXT UNIQUE NOT NULL, modified_s REAL, data BLOB NOT NULL)"
_TROUBLES = {
    sqlite3.SQLITE_BUSY: StoreTrouble.LATE,
    sqlite3.SQLITE_LOCKED: StoreTrouble.LATE,
    sqlite3.SQLITE_FULL: StoreTrouble.FULL,
    sqlite3.SQLITE_PERM: StoreTrouble.DENIED,
    sqlite3.SQLITE_READONLY: StoreTrouble.DENIED,
}
Result = TypeVar("Result")


def open_store(url: str, options: Mapping[str, str], deadline_s: float) -> "SqliteStore":
    """What the entry point names. It opens no file yet: the first call does, in a thread."""
    path = Path(unquote(urlsplit(url).path))
    if urlsplit(url).netloc or not path.is_absolute():
        raise StoreError(StoreTrouble.OTHER, "write sqlite:///FILE with the whole path of the file")
    unknown = sorted(set(options) - {"threads"})
    threads = options.get("threads", str(THREADS))
    if unknown or not threads.isdecimal() or not 1 <= int(threads) <= 64:
        raise StoreError(
            StoreTrouble.OTHER, "write threads=NUMBER, from 1 to 64, in store.options, or nothing"
        )
    return SqliteStore(path, int(threads), deadline_s)


class SqliteStore:
    """Objects are rows of one table. Each thread has a connection, and each call one transaction."""

    def __init__(self, path: Path, threads: int, deadline_s: float) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sqlite")
        self._of_thread = threading.local()
        self._connections: list[sqlite3.Connection] = []

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        def insert(connection: sqlite3.Connection) -> bool:
            row = (name, time.time(), b"".join(parts))
            # A transaction of one statement: others see the whole row, or none.
            return connection.execute("INSERT OR IGNORE INTO objects VALUES (?, ?, ?)", row).rowcount == 1

        return await self._in_thread(name, insert)

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        def read(connection: sqlite3.Connection) -> Piece:
            with _blob(connection, name) as blob:
                blob.seek(min(begin, len(blob)))
                return Piece(blob.read(size_bytes), len(blob))

        return await self._in_thread(name, read)

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        def read(connection: sqlite3.Connection) -> list[bytes]:
            with _blob(connection, name) as blob:
                found = []
                for begin, size_bytes in ranges:
                    if begin + size_bytes > len(blob):
                        message = f"{name}: ends before byte {begin + size_bytes}"
                        raise StoreError(StoreTrouble.MISSING, message)
                    blob.seek(begin)
                    found.append(blob.read(size_bytes))
                return found

        return await self._in_thread(name, read)

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        def select(connection: sqlite3.Connection) -> list[Listed]:
            # The prefix ends with a slash, and no character lies between that and the digit 0.
            rows = connection.execute(
                "SELECT name, length(data), modified_s FROM objects "
                "WHERE name >= ? AND name < ? AND name > ? ORDER BY name LIMIT ?",
                (prefix, f"{prefix[:-1]}0", after, limit),
            )
            return [Listed(*row) for row in rows]

        return await self._in_thread(prefix, select)

    async def delete(self, name: str) -> None:
        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM objects WHERE name = ?", (name,))

        await self._in_thread(name, delete)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        for connection in self._connections:
            connection.close()

    async def _in_thread(self, name: str, call: Callable[[sqlite3.Connection], Result]) -> Result:
        """Does a call in one of the threads, so that the event loop goes on. If it is cancelled, the thread
        still finishes what it has begun, for nobody, and within SQLite's own timeout."""

        def whole() -> Result:
            with _troubles(name):
                return call(self._connection())

        return await asyncio.get_running_loop().run_in_executor(self._threads, whole)

    def _connection(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._of_thread, "connection", None)
        if found is None:
            # No isolation level: each statement is a transaction of its own.
            found = sqlite3.connect(
                self._path, timeout=self._deadline_s, isolation_level=None, check_same_thread=False
            )
            self._use_wal(found)
            found.execute("PRAGMA synchronous = FULL")  # `put` returns when the row is on the disk
            found.execute(_TABLE)
            self._of_thread.connection = found
            self._connections.append(found)
        return found

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        """Switches to the write-ahead log. If others do that as well, SQLite says at once that the file is
        locked, whatever the timeout is."""
        ends_s = time.monotonic() + self._deadline_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.01)
            else:
                return


@contextmanager
def _blob(connection: sqlite3.Connection, name: str) -> Iterator[sqlite3.Blob]:
    row = connection.execute("SELECT rowid FROM objects WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise StoreError(StoreTrouble.MISSING, f"{name}: there is no such object")
    with connection.blobopen("objects", "data", row[0], readonly=True) as blob:
        yield blob


@contextmanager
def _troubles(name: str) -> Iterator[None]:
    """Raises what SQLite raises as StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without what it says in detail
        trouble = _TROUBLES.get(code, StoreTrouble.OTHER)
        raise StoreError(trouble, f"{name}: {error}") from error
