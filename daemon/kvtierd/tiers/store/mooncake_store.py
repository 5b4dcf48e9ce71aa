"""The driver of Mooncake Store, the pooled memory of a cluster of hosts.

An object is one object of Mooncake with one byte more, because Mooncake has none without bytes. Its name is
told to others by `mooncake_names.py`. pyproject.toml declares the entry point.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from kvtierd.tiers.store.mooncake_client import MooncakeClient, MooncakePlace, fill
from kvtierd.tiers.store.mooncake_names import NAME_BYTES_MAX, NameLog
from kvtierd.tiers.store.objects import Listed, Piece, StoreError, StoreTrouble
from kvtierd.tiers.store.spans import joined
from kvtierd.tiers.store.threads import BlockingCall, CallingThreads

MASTER_PORT: Final = 50_051
"""The master's default."""
THREADS_MAX: Final = 32
COALESCED_BYTES: Final = 64 << 10
"""Two ranges with no more than this between them are read as one."""
SPAN_BYTES_MAX: Final = 2 << 20
Result = TypeVar("Result")
_END: Final = memoryview(b"\0")
"""What each object of Mooncake has behind its bytes."""
_PROTOCOLS: Final = ("tcp", "rdma")
_OPTIONS: Final = ("protocol", "metadata_server", "host", "devices", "replicas")
_FORM: Final = "mooncake://MASTER:PORT/FOLDER"


def open_store(url: str, options: Mapping[str, str], deadline_s: float) -> "MooncakeStore":
    """As `OpenStore`."""
    place, folder = place_of(url, options)
    return MooncakeStore(place, folder, deadline_s)


def place_of(url: str, options: Mapping[str, str]) -> tuple[MooncakePlace, str]:
    """Where a store is, and the folder of its objects. Raises StoreError if the URL or an option cannot be
    used."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or MASTER_PORT
    except ValueError as error:
        _refuse(f"{url}: {error}; write {_FORM}")
    if not host or parts.username is not None or parts.query or parts.fragment:
        _refuse(f"{url}: write {_FORM}, with the host and the port of Mooncake's master")
    folder = parts.path.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9._/-]*", folder):
        _refuse(f"{url}: the folder {folder!r} may have letters, digits, and - _ . / only")
    for name, value in options.items():
        if name not in _OPTIONS:
            _refuse(f"the option {name}={value} is not known; there are {', '.join(_OPTIONS)}")
    protocol = options.get("protocol", "tcp")
    if protocol not in _PROTOCOLS:
        _refuse(f"protocol={protocol}: write {' or '.join(_PROTOCOLS)}, as the cluster's clients have it")
    replicas = options.get("replicas", "1")
    if not re.fullmatch("[1-9]", replicas):
        _refuse(f"replicas={replicas}: write the number of copies of each object, from 1 to 9")
    place = MooncakePlace(
        master_host=host,
        master_port=port,
        metadata_server=options.get("metadata_server", "P2PHANDSHAKE"),
        protocol=protocol,
        devices=options.get("devices", "").replace("+", ","),
        host=options.get("host", ""),
        replicas=int(replicas),
    )
    return place, folder


class MooncakeStore:
    """An `ObjectStore` in the memory of a Mooncake cluster, to which this host gives none of its own."""

    def __init__(self, place: MooncakePlace, folder: str, deadline_s: float) -> None:
        self._threads = CallingThreads(THREADS_MAX, deadline_s)
        self._client = MooncakeClient(place, deadline_s)
        root = f"{folder}/" if folder else ""
        self._objects = f"{root}objects/"
        self._names = NameLog(self._client, f"{root}index/")

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        if len(name.encode()) > NAME_BYTES_MAX:
            _refuse(f"{name}: a name of more than {NAME_BYTES_MAX} bytes")
        return await self._threads.run(name, lambda call: self._put(call, name, parts))

    def _put(self, call: BlockingCall, name: str, parts: Sequence[memoryview]) -> bool:
        size_bytes = sum(part.nbytes for part in parts)
        memory = self._client.take(call, size_bytes + len(_END))
        fill(memory, (*parts, _END))
        if not self._client.create(call, self._objects + name, memory):
            return False
        try:
            self._names.add(call, name, size_bytes)
        except StoreError:
            # Nobody would find it. If it cannot be removed either, the store evicts it when it needs room.
            self._client.remove_if_possible(call, self._objects + name)
            raise
        return True

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        def read(call: BlockingCall) -> Piece:
            object_bytes = self._client.size_of(call, self._objects + name) - len(_END)
            end = min(begin + size_bytes, object_bytes)
            if begin >= end:
                return Piece(b"", object_bytes)
            memory = self._client.take(call, end - begin)
            self._client.read(call, self._objects + name, memory, [(0, begin, end - begin)])
            return Piece(memory.tobytes(), object_bytes)

        return await self._threads.run(name, lambda call: self._forgetting(call, name, read))

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        def read(call: BlockingCall) -> list[memoryview]:
            spans = joined(ranges, COALESCED_BYTES, SPAN_BYTES_MAX)
            last = max((span.end for span in spans), default=0)
            known = self._names.known(name)
            if known is None or known.size_bytes < last:
                object_bytes = self._client.size_of(call, self._objects + name) - len(_END)
                if object_bytes < last:
                    raise StoreError(StoreTrouble.MISSING, f"{name}: ends at byte {object_bytes}")
            memory = self._client.take(call, sum(span.end - span.begin for span in spans))
            wanted, found, at = [], [memoryview(b"")] * len(ranges), 0
            for span in spans:
                if span.end > span.begin:
                    wanted.append((at, span.begin, span.end - span.begin))
                for place in span.places:
                    begin, size_bytes = ranges[place]
                    first = at + begin - span.begin
                    found[place] = memory[first : first + size_bytes].data
                at += span.end - span.begin
            self._client.read(call, self._objects + name, memory, wanted)
            return found

        return await self._threads.run(name, lambda call: self._forgetting(call, name, read))

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        return await self._threads.run(prefix, lambda call: self._names.list(call, prefix, after, limit))

    async def delete(self, name: str) -> None:
        """Removes an object, if there is one. Mooncake refuses that for some seconds after each read of it:
        that is a StoreError LATE."""

        def delete(call: BlockingCall) -> None:
            self._client.remove(call, self._objects + name)
            self._names.delete(call, name)

        await self._threads.run(name, delete)

    async def close(self) -> None:
        await self._threads.run("close", lambda call: self._client.close())
        self._threads.end()

    def _forgetting(self, call: BlockingCall, name: str, read: Callable[[BlockingCall], Result]) -> Result:
        """Reads an object, and forgets it if it has gone."""
        try:
            return read(call)
        except StoreError as error:
            if error.trouble is StoreTrouble.MISSING:
                with contextlib.suppress(StoreError):  # then it is forgotten the next time
                    [there] = self._client.exist(call, [self._objects + name])
                    if not there:
                        self._names.forget(call, name)
            raise


def _refuse(why: str) -> NoReturn:
    raise StoreError(StoreTrouble.OTHER, why)
