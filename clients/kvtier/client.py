"""The blocking client. Two threads of its own (session, stream) and those of its gRPC channel; all of them
daemonic.

Processes that fork: a client does not work in the child of a fork (everything there is a miss), and the child
drops its copy of the side socket so that the parent's death is still seen. gRPC's own threads do not survive
a fork either: make clients after forking, and leave GRPC_ENABLE_FORK_SUPPORT alone unless you must (set to 0,
a forked child that uses gRPC hangs).
"""

import atexit
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from kvtier.attach import (
    Backoff,
    NotRegisteredError,
    OpenStream,
    SideCall,
    SideReply,
    Step,
    Steps,
    Work,
    attach,
    open_index,
    register,
    unregister,
)
from kvtier.base import (
    CHANNEL_OPTIONS,
    CLOSE_TIMEOUT_S,
    ClientBase,
    LookupCallBase,
    TransferBase,
)
from kvtier.errors import ConnectionLostError, KvtierError, NotExportableError, explain_rpc_error
from kvtier.joint import GroupQuery
from kvtier.lookups import BlockIds, Hashes, Lease, Lookup, LookupMode
from kvtier.retention import Retention
from kvtier.session import Doorbell
from kvtier.side import SideSocket, call_blocking
from kvtier.status import ClientState
from kvtier.transfers import Outcome, TransferState
from kvtier.v1 import cache_pb2, cache_pb2_grpc

log = logging.getLogger("kvtier")

LOOKUP_TIMEOUT_S = 1.0
LASTED_S = 1.0
"""A session that lasted this long starts the backoff anew."""
WORD_POLL_S = 0.005
"""How often a part word is read while its daemon is gone and only its copy worker can end it."""
EVENT_POLL_S = 0.05
IDLE_WAIT_S = 60.0
STREAM_JOIN_S = 2.0


class LookupCall(LookupCallBase):
    """A lookup on its way."""

    def wait(self, timeout_s: float) -> Lookup:
        """The answer, or a miss if it has not come in time; then the lookup is abandoned (see `abandon`)."""
        if self._record.answer is None:
            self._record.event.wait(max(0.0, timeout_s))  # type: ignore[attr-defined]
        return self.abandon()

    def wait_for_answer(self, timeout_s: float) -> Lookup | None:
        """The answer, or None if it has not come in time; the lookup stays on its way."""
        if self._record.answer is None:
            self._record.event.wait(max(0.0, timeout_s))  # type: ignore[attr-defined]
        return self._record.answer


class Transfer(TransferBase):
    """A submitted store or load."""

    def wait(self, timeout_s: float) -> Outcome:
        """Waits until the outcome is known, at most `timeout_s`; returns how it stands then.

        Never says that it is over while a copy may still land: `outcome.fenced` is False then. Ask again, or
        `revoke`.
        """
        deadline_s = time.monotonic() + timeout_s
        self._client.flush()
        while True:
            outcome = self.outcome
            remaining_s = deadline_s - time.monotonic()
            if outcome.state is not TransferState.ACTIVE or remaining_s <= 0:
                return outcome
            if self._record.event.is_set():  # the daemon is gone: only the part word can tell
                time.sleep(min(remaining_s, WORD_POLL_S))
            else:
                self._record.event.wait(min(remaining_s, EVENT_POLL_S))  # type: ignore[attr-defined]


class _Stream:
    """One gRPC stream and its thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.over = False
        self.call: Any = None
        self.reader: threading.Thread | None = None


class Client(ClientBase):
    """A blocking client of kvtierd. Every method may be called from any thread.

    It connects in the background from the moment it is made, and again whenever the daemon went away. Close
    it, or use it as a context manager.
    """

    def _start(self) -> None:
        self._writable = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._interrupt = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._side: SideSocket | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)
        _clients.add(self)
        atexit.register(self.close, 1.0)
        self._thread.start()

    @staticmethod
    def _make_event() -> threading.Event:
        return threading.Event()

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until everything works, at most `timeout_s`. False: see `status.why`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._session.state is not ClientState.READY:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or self._closing.is_set():
                    return False
                self._changed.wait(min(remaining_s, EVENT_POLL_S))
        return True

    def start_lookup(
        self,
        hashes: Hashes,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        lease: bool = False,
        host_only: bool = False,
    ) -> LookupCall:
        """Asks which blocks can be loaded now, without waiting. Many may be on their way at once.

        Every call must be waited for or abandoned: an answer may hold a lease.
        """
        return LookupCall(self, self._start_lookup(hashes, group, mode, lease, host_only))

    def lookup(
        self,
        hashes: Hashes,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        lease: bool = False,
        host_only: bool = False,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> Lookup:
        """Which blocks can be loaded now.

        hashes: n block hashes in sequence order: a list of n bytes objects of `namespace.hash_bytes` each,
            one bytes object of n * hash_bytes, or a uint8 array of shape (n, hash_bytes).
        group: number of the KV cache group, from 0.
        mode: PREFIX asks for the leading run of blocks that can all be loaded, EXACT for each by itself.
        lease: blocks that hit stay until they are loaded or the answer is released: use it in a `with`.
        host_only: what only a disk has is a miss, and stays there; all of it is, if the daemon is too old for
            that (`status.can_retain`).
        timeout_s: seconds to wait for the answer. None in time is a miss, and so is every lookup after it
            until the daemon speaks again.

        Returns a Lookup: `hits` blocks, and in `states` a byte, MISS, PENDING or HIT, for each hash (in
        PREFIX mode up to the first that is no hit). Raises KvtierError for hashes of another length, and for
        a group that this client does not have.
        """
        call = self.start_lookup(hashes, group=group, mode=mode, lease=lease, host_only=host_only)
        return call.wait(timeout_s)

    def start_lookup_groups(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery],
        *,
        lease: bool = False,
        host_only: bool = False,
    ) -> LookupCall:
        """As `lookup_groups`, without waiting. Every call must be waited for or abandoned."""
        return LookupCall(self, self._start_lookup_groups(hashes, queries, lease, host_only))

    def lookup_groups(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery],
        *,
        lease: bool = False,
        host_only: bool = False,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> Lookup:
        """The longest prefix that all these groups can load now. The answer's `groups` has each of them, with
        a lease of its own: of what the prefix needs, for all groups or for none.

        `hashes` as for `lookup`, of the group with the smallest blocks; `queries`: one for each group. Waits
        `timeout_s` seconds at most. A miss if the daemon is too old for it.
        """
        call = self.start_lookup_groups(hashes, queries, lease=lease, host_only=host_only)
        return call.wait(timeout_s)

    def start_prefetch_groups(self, hashes: Hashes, queries: Sequence[GroupQuery]) -> LookupCall:
        """Has what makes that prefix longer promoted, without waiting. Its answer holds no lease."""
        return LookupCall(self, self._start_prefetch_groups(hashes, queries))

    def start_prefetch(
        self, hashes: Hashes, *, group: int = 0, mode: LookupMode = LookupMode.PREFIX
    ) -> LookupCall:
        """As `prefetch`, without waiting. Its answer holds no lease: nobody needs to wait for it."""
        return LookupCall(self, self._start_prefetch(hashes, group, mode))

    def prefetch(
        self,
        hashes: Hashes,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> Lookup:
        """Has blocks that only a lower tier holds promoted to host memory, ahead of a lookup: the leading run
        of blocks that are in some tier or, in exact mode, each that is. As many as there is room for.

        Does not wait for the promotion: the answer tells what a lookup would tell now, without a lease and
        without a word about what to load. What is on its way is PENDING.
        """
        return self.start_prefetch(hashes, group=group, mode=mode).wait(timeout_s)

    def store(
        self,
        hashes: Hashes,
        block_ids: BlockIds,
        *,
        group: int = 0,
        doorbell: Doorbell | None = None,
        retention: Retention | None = None,
        lazily: bool = False,
    ) -> Transfer:
        """Submits a store, for all ranks of the instance, and returns at once.

        hashes: n block hashes in sequence order, a parent before its children: a list of n bytes objects of
            `namespace.hash_bytes` each, one bytes object of n * hash_bytes, or a uint8 array of shape
            (n, hash_bytes).
        block_ids: n integers from 0 to `num_blocks` - 1 of the group, a list or an integer array of shape
            (n,): `block_ids[i]` is the engine's block of `hashes[i]`, on every rank.
        group: number of the KV cache group, from 0.
        doorbell: no rank starts before this doorbell of its own has reached the value; None: at once.
        retention: how long and where the blocks are kept; a daemon that is too old for it
            (`status.can_retain`) refuses the store.
        lazily: nobody waits for its end. It is sent with the next message, after `flush`, or at the latest
            with the next heartbeat, and its end may be told up to 10 ms later, together with that of others.
            Spares both sides messages.

        The blocks must not change until the transfer is fenced. Raises KvtierError for hashes of another
        length, for other counts, and for ids that do not exist; what the daemon refuses is told by the
        outcome.
        """
        record = self._submit_store(hashes, block_ids, group, doorbell, retention, lazily=lazily)
        return Transfer(self, record)

    def load(
        self,
        source: Lookup | Lease,
        block_ids: BlockIds,
        *,
        group: int = 0,
        first: int = 0,
        doorbell: Doorbell | None = None,
        keep_lease: bool = False,
    ) -> Transfer:
        """Submits a load, for all ranks of the instance, and returns at once.

        source: the answer to a lookup with `lease=True`, or its lease.
        block_ids: n integers from 0 to `num_blocks` - 1 of the group, a list or an integer array of shape
            (n,), no id twice: block `first + i` of the lease goes to the engine's block `block_ids[i]`, on
            every rank. n may be less than what is leased.
        group: number of the KV cache group, from 0; the one that was looked up.
        first: block of the lease to begin with, from 0.
        doorbell: no rank starts before this doorbell of its own has reached the value; None: at once.
        keep_lease: the lease is not consumed, and can be loaded from again.

        The blocks belong to the transfer until it is fenced. A refused load consumes nothing. Raises
        KvtierError for a source without a lease, for more blocks than it has, and for ids that do not exist;
        what the daemon refuses is told by the outcome.
        """
        return Transfer(self, self._submit_load(source, block_ids, group, first, doorbell, keep_lease))

    def release_memory(self, timeout_s: float) -> bool:
        """Takes this rank's memory back, for an engine that sleeps, or moves its cache. From the call on
        every lookup of the instance misses, and nothing more starts.

        True once no copy touches the memory any more and the daemon has it mapped no longer: then it may be
        freed. (Of a session that ended by itself the daemon closes the mappings a moment later.) False if
        that did not happen within `timeout_s`: it goes on; call again. `register_memory` brings memory in.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._memory_wanted_back()
            while not self._session.memory.released:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._changed.wait(min(remaining_s, WORD_POLL_S))
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Ends the session, within `timeout_s`. Safe to call twice, from any thread.

        Parts that have not started never will. Returns True if no copy touches this client's memory any more;
        False if a copy was still running, or the threads did not end, in time: then call it again before
        reusing the memory.
        """
        deadline_s = time.monotonic() + timeout_s
        atexit.unregister(self.close)
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._session.close("the client is closed")
                os.eventfd_write(self._interrupt, 1)
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        while True:
            with self._lock:
                self._session.words.reap()
                fenced = self._session.words.started() == 0
            if fenced or time.monotonic() >= deadline_s:
                break
            time.sleep(WORD_POLL_S)
        if self._doorbells is not None:
            self._doorbells.close()
        return fenced and not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the session thread ---

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set():
            stream: list[_Stream] = []
            attached_s: float | None = None
            try:
                self._side = SideSocket(self.address.side_socket, self.address.socket)
                self._perform(attach(self._session), stream)
                attached_s = time.monotonic()
                self._serve(stream)
            except NotExportableError as error:
                why = f"this client's memory cannot be shared: {error}"
            except KvtierError as error:
                why = f"the daemon refused this client: {error}"
            except ConnectionLostError as error:
                why = str(error)
            except Exception as error:
                log.exception("the session failed; it is tried again")
                why = f"{type(error).__name__}: {error}"
            with self._lock:  # first of all nobody waits any more, and nothing can start
                for one in stream:
                    one.over = True
                closing = self._closing.is_set()
                known = closing or self._is_known(why)
                if not closing:
                    self._session.lost(why)
            self._tear_down(stream)
            if not known:
                self._tell_lost(why)
            if attached_s is not None and time.monotonic() - attached_s > LASTED_S:
                backoff.reset()
            self._closing.wait(backoff.next_s())
        with self._lock:
            os.close(self._wake)
            os.close(self._interrupt)
            self._wake = self._interrupt = -1

    def _serve(self, stream: list[_Stream]) -> None:
        """Keeps the session alive until it ends by an exception."""
        assert self._side is not None
        poll = select.poll()
        poll.register(self._side, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        retry_s = 0.0  # of the monotonic clock
        while True:
            wait_s = IDLE_WAIT_S
            if self._session.memory.wants_release:
                self._perform(unregister(self._session), stream)
            if self._session.memory.wants_registration and time.monotonic() >= retry_s:
                try:
                    self._perform(register(self._session, self._doorbells), stream)
                except NotRegisteredError as error:
                    retry_s = time.monotonic() + error.retry_s
                    self._report(error)
            if self._session.wants_index:
                self._perform(open_index(self._session), stream)
            if self._session.memory.wants_registration:
                wait_s = max(0.0, retry_s - time.monotonic())
            with self._lock:
                wait_s = min(wait_s, self._session.tick())
                self._wake_writer()
                self._changed.notify_all()
                newly_ready = self._session.take_ready()
            if newly_ready:
                self._tell_ready()
            for fd, _ in poll.poll(wait_s * 1_000):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    time.sleep(EVENT_POLL_S)  # the stream may bring the reason
                    with self._lock:
                        self._session.tick()
                    raise ConnectionLostError("the daemon closed the side socket")

    def _perform(self, steps: Steps, stream: list[_Stream]) -> None:
        """Performs all steps. Raises what comes out of them."""
        result: Any = None
        error: Exception | None = None
        while True:
            with self._lock:
                if self._closing.is_set() and error is None:
                    if isinstance(result, SideReply):
                        for fd in result.fds:
                            os.close(fd)
                    error = ConnectionLostError("the client is closing")
                try:
                    step = steps.send(result) if error is None else steps.throw(error)
                except StopIteration:
                    return
            result = error = None
            try:
                result = self._perform_one(step, stream)
            except Exception as caught:  # the steps may know what to do
                error = caught

    def _perform_one(self, step: Step, stream: list[_Stream]) -> Any:
        match step:
            case SideCall():
                assert self._side is not None
                return call_blocking(self._side, step, self._interrupt, self._keep_alive)
            case Work():
                self._keep_alive()
                return step.call()
            case OpenStream():
                stream.append(self._open_stream())
                step.record.event.wait(step.timeout_s)  # type: ignore[attr-defined]
                return None

    def _keep_alive(self) -> float:
        """Called again and again while steps are performed, which may take longer than the daemon's patience.
        Returns the seconds until the next call must come."""
        with self._lock:
            if self._session.epoch is None:
                return IDLE_WAIT_S
            wait_s = self._session.tick()
            self._wake_writer()
            return wait_s

    def _open_stream(self) -> _Stream:
        stream = _Stream(grpc.insecure_channel(self.address.target, options=CHANNEL_OPTIONS))
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
        """What gRPC sends; runs in a thread of gRPC's, which ends with it."""
        while True:
            with self._writable:
                while not stream.over and not self._session.has_outgoing:
                    self._writable.wait(IDLE_WAIT_S)
                if stream.over:
                    return
                messages = self._session.take_outgoing()
            yield from messages

    def _read(self, stream: _Stream) -> None:
        why = "the daemon closed the stream"
        try:
            for message in stream.call:
                with self._lock:
                    if stream.over:
                        return
                    self._session.receive(message)
                    self._wake_writer()
                    self._changed.notify_all()
                    if self._session.needs_attention:
                        self._wake_session()
        except grpc.RpcError as error:
            why = explain_rpc_error(error, self.address.socket)
        finally:
            with self._lock:
                if not stream.over:
                    self._session.end(why)
                    self._wake_session()

    def _wake_session(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _wake_writer(self) -> None:
        if self._session.has_outgoing:
            self._writable.notify_all()


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The child's copies: no threads, and a lock that nobody will release."""
    for client in _clients:
        client._lock = threading.Lock()
        client._writable = threading.Condition(client._lock)
        client._changed = threading.Condition(client._lock)
        client._closing.set()
        client._doorbells = None  # CUDA does not survive a fork, nor do threads
        client._session.words.close()  # the pages are the parent's: do not seal them
        client._session.close("the process was forked: make a client of its own")
        if client._side is not None:
            client._side.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
