"""The driver of stores that obstore reaches: S3 and what speaks like it, Google's, Azure's, a folder, memory.

pyproject.toml declares its entry points, as any other package would declare its own.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from kvtierd.tiers.store.objects import Listed, Piece, StoreError, StoreTrouble
from kvtierd.tiers.store.spans import joined

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
    from obstore.store import from_url
except ImportError as error:
    raise ImportError(
        f"install it where the daemon is (pip install 'obstore>=0.12,<0.13'): {error}"
    ) from error

COALESCED_BYTES: Final = 256 << 10
"""Two ranges with no more than this between them are read as one."""
SPAN_BYTES_MAX: Final = 8 << 20
"""No more is read at once, so that several connections share a long read."""
_DENIED: Final = (
    "AccessDenied",
    "403 Forbidden",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
)
_UNANSWERED: Final = ("timed out", "error sending request", "retries")
"""Nobody has said anything."""
_CODE: Final = re.compile("<Code>(.*?)</Code>", re.DOTALL)
_MESSAGE: Final = re.compile("<Message>(.*?)</Message>", re.DOTALL)
"""In the answers of S3."""
_SHORT: Final = ("Requested range was invalid", "Invalid range", "InvalidRange", "416 ")
"""The object ends before what was asked for."""
_FULL: Final = ("QuotaExceeded", "507 ", "No space left", "InsufficientStorage", "StorageFull")
_ANSWERED: Final = "non-2xx status code"
"""The store has said no, however often it was asked."""


def open_store(url: str, options: Mapping[str, str], deadline_s: float) -> "ObstoreStore":
    """As `OpenStore`."""
    return ObstoreStore(url, options, deadline_s)


class ObstoreStore:
    """An `ObjectStore` at a URL such as s3://bucket/folder, gs://…, az://…, file:///mnt/shared or memory:///."""

    def __init__(self, url: str, options: Mapping[str, Any], deadline_s: float) -> None:
        """`options` are obstore's, for example endpoint and region; credentials come from the environment or
        the machine, as the store's own tools find them, unless they are among the options. S3 is given the
        SHA-256 of what is put, because servers do not compare the one in the signature, unless the options
        name another `checksum_algorithm`, or an empty one. Raises StoreError if the URL or an option cannot
        be used."""
        self._deadline_s = deadline_s
        patience = timedelta(seconds=deadline_s)
        by_network = not url.startswith(("file:", "memory:"))
        self._lists_in_order = by_network
        network: dict[str, Any] = {}
        if by_network:
            network = {
                "client_options": {
                    "timeout": patience,
                    "connect_timeout": patience,
                    "allow_http": str(options.get("endpoint", "")).startswith("http://"),
                },
                "retry_config": {"max_retries": 3, "retry_timeout": patience},
            }
        elif url.startswith("file:"):
            network = {"mkdir": True}
        if url.startswith("s3:"):
            options = {"checksum_algorithm": "sha256", **options}
            if not options["checksum_algorithm"]:
                del options["checksum_algorithm"]
        try:
            self._store = from_url(url, **options, **network)
        except (BaseError, ValueError, TypeError) as error:
            raise StoreError(StoreTrouble.OTHER, f"{url}: {error}") from None

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        with _troubles(name):
            async with asyncio.timeout(self._deadline_s):
                try:
                    await obstore.put_async(
                        self._store, name, b"".join(parts), mode="create", use_multipart=False
                    )
                except (AlreadyExistsError, PreconditionError):
                    return False
                return True

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        with _troubles(name):
            async with asyncio.timeout(self._deadline_s):
                answer = await obstore.get_async(
                    self._store, name, options={"range": (begin, begin + size_bytes)}
                )
                return Piece(bytes(await answer.bytes_async()), answer.meta["size"])

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        spans = joined(ranges, COALESCED_BYTES, SPAN_BYTES_MAX)
        with _troubles(name):
            async with asyncio.timeout(self._deadline_s):
                # obstore joins neighbours as well, but panics where an object ends before one of them begins.
                found = await obstore.get_ranges_async(
                    self._store,
                    name,
                    starts=[span.begin for span in spans],
                    ends=[span.end for span in spans],
                    coalesce=0,
                )
        parts = [memoryview(b"")] * len(ranges)
        for span, data in zip(spans, found, strict=True):
            if len(data) != span.end - span.begin:
                raise StoreError(StoreTrouble.MISSING, f"{name}: ends before byte {span.end}")
            whole = memoryview(data)
            for place in span.places:
                begin, size_bytes = ranges[place]
                parts[place] = whole[begin - span.begin : begin - span.begin + size_bytes]
        return parts

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        found: list[Listed] = []
        with _troubles(prefix):
            async with asyncio.timeout(self._deadline_s):
                async for listed in self._in_order(prefix, after):
                    found.append(listed)
                    if len(found) == limit:
                        break
        return found

    async def _in_order(self, prefix: str, after: str) -> AsyncIterator[Listed]:
        stream = obstore.list(self._store, prefix.rstrip("/"), offset=after or None, chunk_size=1_000)
        rows: list[Listed] = []
        async for chunk in stream:
            rows += (
                Listed(row["path"], row["size"], row["last_modified"].timestamp())
                for row in chunk
                if row["path"].startswith(prefix) and row["path"] > after
            )
            if self._lists_in_order:
                for row in rows:
                    yield row
                rows.clear()
        for row in sorted(rows, key=lambda row: row.name):
            yield row

    async def delete(self, name: str) -> None:
        with _troubles(name):
            async with asyncio.timeout(self._deadline_s):
                with suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, name)

    async def close(self) -> None:
        del self._store


@contextmanager
def _troubles(name: str) -> Iterator[None]:
    """Raises what obstore raises as StoreError."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(StoreTrouble.MISSING, f"{name}: {_said(error)}") from None
    except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
        raise StoreError(StoreTrouble.DENIED, f"{name}: {_said(error)}") from None
    except TimeoutError:
        raise StoreError(StoreTrouble.LATE, f"{name}: no answer in time") from None
    except StoreError:
        raise
    except Exception as error:  # also the panics of its native code
        text = str(error)
        if any(sign in text for sign in _SHORT):
            trouble = StoreTrouble.MISSING
        elif any(sign in text for sign in _DENIED):
            trouble = StoreTrouble.DENIED
        elif any(sign in text for sign in _FULL):
            trouble = StoreTrouble.FULL
        elif _ANSWERED not in text and any(sign in text for sign in _UNANSWERED):
            why = " ".join(text.partition("\n\n")[0].rpartition(" - ")[2].split())
            raise StoreError(StoreTrouble.LATE, f"{name}: no answer ({why})") from None
        else:
            trouble = StoreTrouble.OTHER
        raise StoreError(trouble, f"{name}: {_said(error)}") from None


def _said(error: BaseException) -> str:
    """What an error says to people, in one line: what the store has answered, if there is that."""
    text = str(error).partition("\n\n")[0]
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is not None:
        text = code[1] if message is None else f"{code[1]}: {message[1]}"
    return " ".join(text.split())
