"""The threads that keep a session with the daemon: one for the session, one for the stream, and those of the
gRPC channel. All are daemonic. A call of a driver, which may hang, runs in a thread of its own.

A client does not work in a forked child, where every lookup misses. The child closes its copy of the side
socket, so that the parent's death is still noticed. gRPC's own threads do not survive a fork either: make
clients after forking, and do not set GRPC_ENABLE_FORK_SUPPORT unless you must (with 0, a child that uses gRPC
hangs).
"""

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from kvtier.connection import steps
from kvtier.connection.address import Address
from kvtier.connection.reports import ConnectionReports
from kvtier.connection.rpc_errors import explain_rpc_error
from kvtier.connection.side_socket import SideSocket, call_blocking
from kvtier.connection.trust import require_listener
from kvtier.errors import ConnectionLostError, KvtierError, NotExportableError
from kvtier.memory import StreamDoorbells
from kvtier.session.state import ProtocolState
from kvtier.status import ClientStatus
from kvtier.v1 import cache_pb2, cache_pb2_grpc

log = logging.getLogger("kvtier")

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # A connection of its own for every client: its end is the end of the session.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # The default backoff costs 2.8 s after a restart of the daemon, these 0.1 s.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Heartbeats notice a silent daemon within about a second; keepalive gives up a connection that is beyond
    # hope.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
LASTED_S = 1.0
"""After a session that lasted this long, the pauses between attempts start anew."""
REASON_S = 0.05
"""After the side socket is closed, the reason may come on the stream within this time."""
IDLE_WAIT_S = 60.0
RELEASE_DELAY_S = 0.02
"""How long a lease that is given back may wait for a message to go with. Meanwhile its blocks cannot be
evicted."""
STREAM_JOIN_S = 2.0


@dataclass(slots=True)
class _Stream:
    """One gRPC stream and its thread."""

    channel: grpc.Channel
    over: bool = False
    call: Any = None
    reader: threading.Thread | None = None


class ConnectionThreads:
    """Connects the session in the background, and again whenever the daemon went away, until `end`.

    `lock` is held around every use of the session.
    """

    def __init__(
        self,
        session: ProtocolState,
        address: Address,
        reports: ConnectionReports,
        doorbells: StreamDoorbells | None,
        *,
        changed: threading.Event,
        ended: threading.Event,
    ) -> None:
        """Starts the session's thread. `doorbells` is how streams of a GPU ring, if they do. `changed` is set
        when the session may have another state, and `ended` when no thread of this class runs any more."""
        self.lock = threading.Lock()
        self.session = session
        self.doorbells = doorbells
        self.changed = changed
        self.ended = ended
        self._address = address
        self._reports = reports
        self._writable = threading.Condition(self.lock)
        self._lingers = False
        """Whether the thread that sends looks again within RELEASE_DELAY_S by itself, so that nobody need
        wake it for a lease that is given back."""
        self.closing = threading.Event()
        """Set once `end` was called."""
        self._working = threading.Event()
        """Set to end the wait for a call that may take a while."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._interrupt = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._side: SideSocket | None = None
        self.thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)
        """The session's thread, which cannot wait for its own end. It ends after it has set `ended`."""
        _all.add(self)
        self.thread.start()

    def status(self) -> ClientStatus:
        """Returns a snapshot of the client's state. Called without the lock."""
        mode = "" if self.doorbells is None else self.doorbells.mode
        with self.lock:
            return self.session.status(mode)

    def wake_session(self) -> None:
        """Wakes the session's thread to register memory or give it back. Called with the lock held."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def wake_writer(self) -> None:
        """Wakes the thread that sends, if there are messages. Called with the lock held."""
        if self._must_send:
            self._writable.notify_all()

    @property
    def _must_send(self) -> bool:
        return self.session.has_outgoing or (self.session.has_releases and not self._lingers)

    def flush(self) -> None:
        """Sends the messages that were submitted `lazily` and wait for another one. Never waits; costs next
        to nothing if there are none. Called without the lock."""
        if self.session.has_unhurried:
            with self.lock:
                self.session.hurry()
                self.wake_writer()

    def end(self) -> None:
        """Ends the session now; the threads end soon. Safe to call twice."""
        with self.lock:
            if not self.closing.is_set():
                self.closing.set()
                self._working.set()
                self.session.close("the client is closed")
                os.eventfd_write(self._interrupt, 1)
                os.eventfd_write(self._wake, 1)

    # --- the session thread ---

    def _run(self) -> None:
        backoff = steps.Backoff()
        while not self.closing.is_set():
            streams: list[_Stream] = []
            attached_s: float | None = None
            try:
                self._side = SideSocket(self._address)
                self._perform(steps.attach(self.session), streams)
                attached_s = time.monotonic()
                self._serve(streams)
            except NotExportableError as error:
                why = f"this client's memory cannot be shared: {error}"
            except KvtierError as error:
                why = f"the daemon refused this client: {error}"
            except ConnectionLostError as error:
                why = str(error)
            except Exception as error:
                log.exception("the session failed; it is tried again")
                why = f"{type(error).__name__}: {error}"
            with self.lock:  # first, so that nobody waits any more, and nothing can start
                for stream in streams:
                    stream.over = True
                closing, told_before = self.closing.is_set(), self.session.last_error
                if not closing:
                    self.session.lost(why)
            self._tear_down(streams)
            if not closing:
                self._reports.lost(why, told_before)
            if attached_s is not None and time.monotonic() - attached_s > LASTED_S:
                backoff.reset()
            self.closing.wait(backoff.next_s())
        with self.lock:
            os.close(self._wake)
            os.close(self._interrupt)
            self._wake = self._interrupt = -1
        self.ended.set()

    def _serve(self, streams: list[_Stream]) -> None:
        """Keeps the session alive until an exception ends it."""
        assert self._side is not None
        poll = select.poll()
        poll.register(self._side, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        memory, retry_s = self.session.memory, 0.0  # by the monotonic clock
        while True:
            wait_s = IDLE_WAIT_S
            if memory.wants_release:
                self._perform(steps.unregister(self.session), streams)
            if memory.wants_registration and time.monotonic() >= retry_s:
                try:
                    self._perform(steps.register(self.session, self.doorbells), streams)
                except steps.NotRegisteredError as error:
                    retry_s = time.monotonic() + error.retry_s
                    self._reports.not_registered(error)
            if self.session.wants_index:
                self._perform(steps.open_index(self.session), streams)
            if memory.wants_registration:
                wait_s = max(0.0, retry_s - time.monotonic())
            with self.lock:
                wait_s = min(wait_s, self.session.tick())
                self.wake_writer()
                newly_ready = self.session.take_ready()
            self.changed.set()
            if newly_ready:
                self._reports.ready(self.status())
            for fd, _ in poll.poll(wait_s * 1_000):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    time.sleep(REASON_S)
                    with self.lock:
                        self.session.tick()
                    raise ConnectionLostError("the daemon closed the side socket")

    def _perform(self, wanted: steps.Steps, streams: list[_Stream]) -> None:
        """Performs all steps. Raises what they raise."""
        result: Any = None
        error: Exception | None = None
        while True:
            with self.lock:
                if self.closing.is_set() and error is None:
                    if isinstance(result, steps.SideReply):
                        for fd in result.fds:
                            os.close(fd)
                    error = ConnectionLostError("the client is closing")
                try:
                    step = wanted.send(result) if error is None else wanted.throw(error)
                except StopIteration:
                    return
            result = error = None
            try:
                result = self._perform_one(step, streams)
            except Exception as caught:  # the steps may handle it
                error = caught

    def _perform_one(self, step: steps.Step, streams: list[_Stream]) -> Any:
        match step:
            case steps.SideCall():
                assert self._side is not None
                return call_blocking(self._side, step, self._interrupt, self._keep_alive)
            case steps.Work():
                return self._work(step.call)
            case steps.OpenStream():
                streams.append(self._open_stream())
                step.record.event.wait(step.timeout_s)
                return None

    def _work(self, call: Callable[[], Any]) -> Any:
        """Makes the call in a thread of its own, which is not waited for at the end, because a driver may
        hang. Returns what `call` returns, raises what it raises, and raises ConnectionLostError if the client
        closes meanwhile."""
        outcome: list[tuple[Any, Exception | None]] = []
        over = threading.Event()

        def run() -> None:
            try:
                outcome.append((call(), None))
            except Exception as error:
                outcome.append((None, error))
            over.set()

        with self.lock:
            self._working = over
        threading.Thread(target=run, name="kvtier-work", daemon=True).start()
        while not outcome:
            if self.closing.is_set():
                raise ConnectionLostError("the client is closing")
            over.wait(self._keep_alive())
        [(result, error)] = outcome
        if error is not None:
            raise error
        return result

    def _keep_alive(self) -> float:
        """Sends heartbeats while steps are performed, which may take longer than the daemon's patience.
        Returns the seconds until the next call must come."""
        with self.lock:
            if self.session.epoch is None:
                return IDLE_WAIT_S
            wait_s = self.session.tick()
            self.wake_writer()
            return wait_s

    def _open_stream(self) -> _Stream:
        require_listener(self._address)
        stream = _Stream(grpc.insecure_channel(self._address.target, options=CHANNEL_OPTIONS))
        stub = cache_pb2_grpc.CacheStub(stream.channel)
        stream.call = stub.Attach(self._requests(stream))
        stream.reader = threading.Thread(target=self._read, args=(stream,), name="kvtier-stream", daemon=True)
        stream.reader.start()
        return stream

    def _tear_down(self, streams: list[_Stream]) -> None:
        for stream in streams:
            with self._writable:
                stream.over = True
                self._writable.notify_all()
            stream.call.cancel()
            stream.channel.close()
            if stream.reader is not None:
                stream.reader.join(STREAM_JOIN_S)
        if self._side is not None:
            self._side.close()

    # --- the stream's threads ---

    def _requests(self, stream: _Stream) -> Iterator[cache_pb2.AttachRequest]:
        """Yields what gRPC sends. It runs in a thread of gRPC's, which ends with it."""
        while True:
            with self._writable:
                while not stream.over and not self._must_send:
                    wait_s = RELEASE_DELAY_S if self._lingers else IDLE_WAIT_S
                    self._lingers &= self._writable.wait(wait_s)
                if stream.over:
                    return
                messages = self.session.take_outgoing()
                self._lingers = self.session.take_lease_asked()
            yield from messages

    def _read(self, stream: _Stream) -> None:
        why = "the daemon closed the stream"
        try:
            for message in stream.call:
                with self.lock:
                    if stream.over:
                        return
                    self.session.receive(message)
                    self.wake_writer()
                    if self.session.needs_attention:
                        self.wake_session()
                if not self.changed.is_set():  # seldom: only while somebody waits for a state
                    self.changed.set()
        except grpc.RpcError as error:
            why = explain_rpc_error(error, self._address.socket)
        finally:
            with self.lock:
                if not stream.over:
                    self.session.end(why)
                    self.wake_session()

    def after_fork_in_child(self) -> None:
        """Makes this copy in a forked child harmless: no threads, and a lock that nobody releases."""
        self.lock = threading.Lock()
        self._writable = threading.Condition(self.lock)
        self.changed, self.ended, self.closing = threading.Event(), threading.Event(), threading.Event()
        self.ended.set()
        self.closing.set()
        self.doorbells = None  # CUDA does not survive a fork, nor do threads
        self.session.words.close()  # the pages are the parent's, so they are not sealed
        self.session.close("the process was forked: make a client of its own")
        if self._side is not None:
            self._side.close()


_all: "weakref.WeakSet[ConnectionThreads]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for threads in _all:
        threads.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
