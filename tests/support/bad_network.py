"""A network that breaks: a TCP proxy on loopback, between clients and an HTTP server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self
from urllib.parse import urlsplit

from tests.support.http_framing import Framing, Piece, is_interim

READ_BYTES: Final = 64 << 10
STEP_S: Final = 0.02
"""How long a slow network sleeps between two pieces."""
CORRUPT_EVERY: Final = 4_096
"""One byte of so many is another one in a body that is corrupted."""
PATIENCE_S: Final = 60.0

Wanted = Callable[[bytes], bool]
"""Says by the first line of a request whether it is meant."""


class Way(Enum):
    """Who sends."""

    REQUESTS = "requests"
    ANSWERS = "answers"


class Fault(Enum):
    """What happens to a body."""

    SWALLOW = "swallow"
    """From there on, nothing comes through on any connection, either way, until `heal`. All stay open."""
    CORRUPT = "corrupt"
    """Bytes of it are others."""
    CUT_OFF = "cut off"
    """The connection ends there, with a FIN to both sides."""


@dataclass(frozen=True, slots=True)
class _Weather:
    """How the network is."""

    bytes_per_s: float = 0.0
    """Each way of each connection, at most; 0: any number."""
    latency_s: float = 0.0
    """Before each request and each answer."""
    fault: Fault | None = None
    way: Way = Way.ANSWERS
    wanted: Wanted = lambda line: True
    after_bytes: int = 0
    """So much of a body comes through before the fault; shorter ones do as they are."""


class BadNetwork:
    """Listens on a port of its own, and passes everything on to a server until it is told otherwise. What it
    has swallowed when it heals comes late, as what a real network sends again; connections that were closed
    meanwhile end only then. It accepts connections always."""

    def __init__(self, server: str) -> None:
        """`server` is its URL, such as http://127.0.0.1:8333."""
        parts = urlsplit(server)
        self._server = parts.hostname or "", parts.port or 80
        self._weather = _Weather()
        self._changing = threading.Lock()
        self._passing = threading.Event()
        self._passing.set()
        self._struck = threading.Event()
        self._ended = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._listen)

    # --- the weather ---

    def heal(self) -> None:
        """Everything comes through from now on, and what was swallowed as well."""
        self._change(_Weather())

    def swallow(self) -> None:
        """Nothing comes through from now on."""
        self._change(_Weather(), passes=False)

    def slow(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._change(_Weather(bytes_per_s, latency_s))

    def strike(self, fault: Fault, way: Way, wanted: Wanted, after_bytes: int = 0) -> None:
        """Has the fault happen to the bodies of such requests, or of the answers to them, from now on."""
        self._change(_Weather(fault=fault, way=way, wanted=wanted, after_bytes=after_bytes))

    def wait_struck(self) -> None:
        """Returns when the fault that `strike` has asked for has happened once."""
        assert self._struck.wait(PATIENCE_S), "no such request came"

    def _change(self, weather: _Weather, *, passes: bool = True) -> None:
        with self._changing:
            self._struck.clear()
            self._weather = weather
            if passes:
                self._passing.set()
            else:
                self._passing.clear()

    # --- connections ---

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="bad network", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # it was closed
            try:
                server = socket.create_connection(self._server, PATIENCE_S)
            except OSError:
                client.close()  # the server does not run
                continue
            server.settimeout(None)
            connection = _Connection(self, client, server)
            self._sockets |= {client, server}
            self._start(lambda connection=connection: self._run(connection, Way.REQUESTS))  # type: ignore[misc]
            self._start(lambda connection=connection: self._run(connection, Way.ANSWERS))  # type: ignore[misc]

    def _run(self, connection: _Connection, way: Way) -> None:
        with contextlib.suppress(OSError):  # either side has ended the connection, or `close` has
            connection.pass_on(way)
        self._passing.wait()
        connection.end(way)

    def hold(self) -> _Weather:
        """Returns how the network is, as soon as anything comes through."""
        self._passing.wait()
        if self._ended:
            raise OSError("the network is no more")
        return self._weather

    def has_struck(self, weather: _Weather) -> None:
        """A fault has happened. It is ignored if it has healed meanwhile."""
        with self._changing:
            if self._weather is weather:
                if weather.fault is Fault.SWALLOW:
                    self._passing.clear()
                self._struck.set()

    def close(self) -> None:
        """Ends all connections."""
        self._ended = True
        self._passing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for each in self._sockets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, network: BadNetwork, client: socket.socket, server: socket.socket) -> None:
        self._network = network
        self._ends = {Way.REQUESTS: (client, server), Way.ANSWERS: (server, client)}
        self._asked: deque[bytes] = deque()
        """The first lines of requests that have no answer yet."""
        self._current = {Way.REQUESTS: b"", Way.ANSWERS: b""}
        """The first line of the request that a body belongs to."""

    def pass_on(self, way: Way) -> None:
        source, _ = self._ends[way]
        framing = Framing()
        while data := source.recv(READ_BYTES):
            for piece in framing.split(data):
                self._pass_piece(way, piece)

    def end(self, way: Way) -> None:
        """The one side sends no more, so the other is told so."""
        with contextlib.suppress(OSError):
            self._ends[way][1].shutdown(socket.SHUT_WR)

    def _pass_piece(self, way: Way, piece: Piece) -> None:
        if piece.first_line:
            self._begins(way, piece.first_line)
            time.sleep(self._network.hold().latency_s)
        weather = self._network.hold()
        fault = weather.fault
        is_meant = piece.offset >= 0 and weather.way is way and weather.wanted(self._current[way])
        if fault is not None and is_meant:
            spared = max(0, weather.after_bytes - piece.offset)
            if spared < len(piece.data):
                self._send(way, piece.data[:spared])
                self._network.has_struck(weather)
                self._strike(way, fault, piece.data[spared:], piece.offset + spared)
                return
        self._send(way, piece.data)

    def _begins(self, way: Way, first_line: bytes) -> None:
        if way is Way.REQUESTS:
            self._asked.append(first_line)
            self._current[way] = first_line
        elif not is_interim(first_line):
            self._current[way] = self._asked.popleft() if self._asked else b""

    def _strike(self, way: Way, fault: Fault, rest: bytes, offset: int) -> None:
        """Does to the rest of a piece, which begins at this offset in its body, what is to happen to it."""
        match fault:
            case Fault.SWALLOW:
                self._send(way, rest)
            case Fault.CORRUPT:
                changed = bytearray(rest)
                changed[-offset % CORRUPT_EVERY :: CORRUPT_EVERY] = bytes(
                    each ^ 0x10 for each in changed[-offset % CORRUPT_EVERY :: CORRUPT_EVERY]
                )
                self._send(way, bytes(changed))
            case Fault.CUT_OFF:
                for each in self._ends[way]:
                    each.shutdown(socket.SHUT_RDWR)

    def _send(self, way: Way, data: bytes) -> None:
        _, target = self._ends[way]
        while data:
            weather = self._network.hold()
            some = len(data)
            if weather.bytes_per_s:
                some = max(1, int(weather.bytes_per_s * STEP_S))
                time.sleep(STEP_S)
                self._network.hold()
            target.sendall(data[:some])
            data = data[some:]
