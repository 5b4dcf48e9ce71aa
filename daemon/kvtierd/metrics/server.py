"""The scrape endpoint, on threads of its own, because a scrape costs milliseconds of Python that the event
loop must not spend."""

import contextlib
import errno
import socket
import threading
import time
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvtierd.config.settings import ConfigError

SCRAPES_MAX = 16
"""Scrapes at once. One more ends the oldest. So slow scrapers give way, and nobody can use up the threads and
descriptors that the cache needs; the endpoint is open to every user of the host."""
SCRAPE_SILENCE_S = 10.0
ACCEPT_RETRY_S = 0.2
CLOSE_DEADLINE_S = 2.0


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_SILENCE_S

    def log_message(self, *_: object) -> None:
        """Logs nothing, because a scrape is not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each scrape, and a bound on their number."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._scrapes: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_RETRY_S)  # most likely no descriptors are left; the listener stays readable
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._scrapes[request] = None
            if len(self._scrapes) > SCRAPES_MAX:
                oldest = next(iter(self._scrapes))
                del self._scrapes[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._scrapes.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a scraper that goes away during a scrape."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Serves a registry."""

    def __init__(self, listen: str, registry: CollectorRegistry, *, may_move: bool = False) -> None:
        """Binds `host:port` at once; port 0 picks a free one, as does `may_move` if the port is taken. Raises
        ConfigError if it cannot."""
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            family, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            server_class = _Server6 if family == socket.AF_INET6 else _Server
            make = partial(
                make_server,
                str(address[0]),
                app=make_wsgi_app(registry),
                server_class=server_class,
                handler_class=_Handler,
            )
            try:
                self._server = make(port=int(port))
            except OSError as error:
                if not may_move or error.errno != errno.EADDRINUSE:
                    raise
                self._server = make(port=0)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                "metrics.listen",
                listen,
                f"cannot be bound ({why}): choose another port, 0 for a free one, or off",
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        bound = self._server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}/metrics"

    def close(self) -> None:
        """Ends the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_DEADLINE_S)
