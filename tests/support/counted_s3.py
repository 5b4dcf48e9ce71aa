"""A store that speaks as much of S3 as kvtier uses, in memory, and counts the requests that it is sent: those
that a real store would bill."""

from __future__ import annotations

import bisect
import re
import threading
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "counted"
PAGE_KEYS = 1_000
"""One listing of S3 has no more."""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class CountedS3:
    """One server on loopback. It believes whoever asks."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """How many of each kind: PUT, LIST, GET."""
        self.sent_bytes = 0
        """The bytes of objects that were read."""
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        served = self

        class Handler(_Handler):
            store = served

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def options(self) -> dict[str, Any]:
        """For obstore."""
        return {
            "endpoint": f"http://127.0.0.1:{self._server.server_address[1]}",
            "region": "us-east-1",
            "access_key_id": "counted",
            "secret_access_key": "counted",
            "virtual_hosted_style_request": False,
        }

    def since(self, before: Counter[str]) -> Counter[str]:
        """The requests after a copy of `requests` was taken."""
        with self.lock:
            return self.requests - before

    def page(self, prefix: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        """The next names and sizes of a listing, and whether there are more."""
        names = sorted(name for name in self.objects if name.startswith(prefix))
        first = bisect.bisect_right(names, after)
        some = names[first : first + PAGE_KEYS]
        return [(name, len(self.objects[name])) for name in some], first + len(some) < len(names)


class _Handler(BaseHTTPRequestHandler):
    store: CountedS3
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.store.lock:
            self.store.requests["PUT"] += 1
            there = self._name() in self.store.objects
            if not there:
                self.store.objects[self._name()] = data
        self._answer(412 if there else 200)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list(query)
            return
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        assert found is not None, "kvtier reads ranges"
        with self.store.lock:
            self.store.requests["GET"] += 1
            data = self.store.objects.get(self._name())
        begin = int(found[1])
        if data is None or begin >= len(data):
            self._answer(404 if data is None else 416)
            return
        piece = data[begin : int(found[2]) + 1]
        with self.store.lock:
            self.store.sent_bytes += len(piece)
        self._answer(206, piece, {"Content-Range": f"bytes {begin}-{begin + len(piece) - 1}/{len(data)}"})

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        with self.store.lock:
            self.store.requests["LIST"] += 1
            some, more = self.store.page(prefix, after)
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"1"</ETag><Size>{size}</Size></Contents>'
            for name, size in some
        )
        token = f"<NextContinuationToken>{escape(some[-1][0])}</NextContinuationToken>" if more else ""
        flag = "true" if more else "false"
        text = (
            f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(some)}"
            f"</KeyCount><IsTruncated>{flag}</IsTruncated>{token}{rows}</ListBucketResult>"
        )
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", formatdate(usegmt=True))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
