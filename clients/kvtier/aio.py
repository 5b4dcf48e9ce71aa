"""The asyncio client: the same calls, the same session core; what waits is a coroutine.

A client belongs to the event loop that runs when it is made. Heartbeats are sent from that loop: one that is
blocked for longer than the daemon's lease time loses its leases.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

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
from kvtier.client import EVENT_POLL_S, IDLE_WAIT_S, LASTED_S, LOOKUP_TIMEOUT_S, STREAM_JOIN_S, WORD_POLL_S
from kvtier.errors import ConnectionLostError, KvtierError, NotExportableError, explain_rpc_error
from kvtier.joint import GroupQuery
from kvtier.lookups import BlockIds, Hashes, Lease, Lookup, LookupMode
from kvtier.retention import Retention
from kvtier.session import Doorbell
from kvtier.side import SideSocket
from kvtier.status import ClientState
from kvtier.transfers import Outcome, TransferState
from kvtier.v1 import cache_pb2_grpc

log = logging.getLogger("kvtier")


async def _until(event: Any, timeout_s: float) -> None:
    """Waits for an asyncio.Event, or not longer than this."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        pass


def _in_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> asyncio.Future[Any]:
    """Runs `call` in a thread that nobody waits for at the interpreter's end: a driver may hang."""
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failed = None, None
        try:
            result = call()
        except Exception as error:
            failed = error
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            pass  # the loop is closed: nobody asks any more

    threading.Thread(target=run, name="kvtier-work", daemon=True).start()
    return future


class LookupCall(LookupCallBase):
    """A lookup on its way."""

    async def wait(self, timeout_s: float) -> Lookup:
        """The answer, or a miss if it has not come in time; then the lookup is abandoned (see `abandon`).

        Cancelled while it waits, it is abandoned too, and its lease is released.
        """
        try:
            if self._record.answer is None:
                await _until(self._record.event, timeout_s)
        except asyncio.CancelledError:
            self.abandon().release()
            raise
        return self.abandon()

    async def wait_for_answer(self, timeout_s: float) -> Lookup | None:
        """The answer, or None if it has not come in time; the lookup stays on its way."""
        if self._record.answer is None:
            await _until(self._record.event, timeout_s)
        return self._record.answer


class Transfer(TransferBase):
    """A submitted store or load."""

    async def wait(self, timeout_s: float) -> Outcome:
        """Waits until the outcome is known, at most `timeout_s`; returns how it stands then.

        Never says that it is over while a copy may still land: `outcome.fenced` is False then. Ask again, or
        `revoke`. Cancelling the wait does not cancel the transfer.
        """
        deadline_s = time.monotonic() + timeout_s
        self._client.flush()
        while True:
            outcome = self.outcome
            remaining_s = deadline_s - time.monotonic()
            if outcome.state is not TransferState.ACTIVE or remaining_s <= 0:
                return outcome
            if self._record.event.is_set():  # the daemon is gone: only the part word can tell
                await asyncio.sleep(min(remaining_s, WORD_POLL_S))
            else:
                await _until(self._record.event, min(remaining_s, EVENT_POLL_S))


class _Stream:
    """One gRPC stream and its tasks."""

    def __init__(self, channel: Any, call: Any) -> None:
        self.channel = channel
        self.call = call
        self.tasks: list[asyncio.Task[None]] = []


class Client(ClientBase):
    """An asyncio client of kvtierd; see `kvtier.Client` for what its calls mean. Make it inside a running
    loop.

    Calls that do not wait are plain methods, to be called on that loop only.
    """

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._outgoing = asyncio.Event()
        self._wake = asyncio.Event()
        self._closing = False
        self._side: SideSocket | None = None
        self._task = self._loop.create_task(self._run(), name="kvtier-session")

    @staticmethod
    def _make_event() -> asyncio.Event:
        return asyncio.Event()

    async def wait_ready(self, timeout_s: float) -> bool:
        """Waits until everything works, at most `timeout_s`. False: see `status.why`."""
        deadline_s = time.monotonic() + timeout_s
        while self._session.state is not ClientState.READY:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or self._closing:
                return False
            self._changed.clear()
            await _until(self._changed, min(remaining_s, EVENT_POLL_S))
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
        """As `kvtier.Client.start_lookup`."""
        return LookupCall(self, self._start_lookup(hashes, group, mode, lease, host_only))

    async def lookup(
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
        PREFIX mode up to the first that is no hit). It is a plain context manager: releasing never waits.
        Raises KvtierError for hashes of another length, and for a group that this client does not have.
        """
        call = self.start_lookup(hashes, group=group, mode=mode, lease=lease, host_only=host_only)
        return await call.wait(timeout_s)

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

    async def lookup_groups(
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
        return await call.wait(timeout_s)

    def start_prefetch_groups(self, hashes: Hashes, queries: Sequence[GroupQuery]) -> LookupCall:
        """Has what makes that prefix longer promoted, without waiting. Its answer holds no lease."""
        return LookupCall(self, self._start_prefetch_groups(hashes, queries))

    def start_prefetch(
        self, hashes: Hashes, *, group: int = 0, mode: LookupMode = LookupMode.PREFIX
    ) -> LookupCall:
        """As `kvtier.Client.start_prefetch`."""
        return LookupCall(self, self._start_prefetch(hashes, group, mode))

    async def prefetch(
        self,
        hashes: Hashes,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> Lookup:
        """As `kvtier.Client.prefetch`."""
        return await self.start_prefetch(hashes, group=group, mode=mode).wait(timeout_s)

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

    async def release_memory(self, timeout_s: float) -> bool:
        """As `kvtier.Client.release_memory`."""
        deadline_s = time.monotonic() + timeout_s
        self._memory_wanted_back()
        while not self._session.memory.released:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return False
            await asyncio.sleep(min(remaining_s, WORD_POLL_S))
        return True

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """As `kvtier.Client.close`."""
        deadline_s = time.monotonic() + timeout_s
        if not self._closing:
            self._closing = True
            self._session.close("the client is closed")
            self._task.cancel()
        await asyncio.wait([self._task], timeout=max(0.0, deadline_s - time.monotonic()))
        while True:
            self._session.words.reap()
            fenced = self._session.words.started() == 0
            if fenced or time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(WORD_POLL_S)
        if self._doorbells is not None:
            self._doorbells.close()
        return fenced and self._task.done()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- the session task ---

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            streams: list[_Stream] = []
            attached_s: float | None = None
            try:
                self._side = SideSocket(self.address.side_socket, self.address.socket)
                await self._perform(attach(self._session), streams)
                attached_s = time.monotonic()
                await self._serve(streams)
            except NotExportableError as error:
                why = f"this client's memory cannot be shared: {error}"
            except KvtierError as error:
                why = f"the daemon refused this client: {error}"
            except ConnectionLostError as error:
                why = str(error)
            except Exception as error:
                log.exception("the session failed; it is tried again")
                why = f"{type(error).__name__}: {error}"
            except asyncio.CancelledError:  # by close, which has ended the session
                await self._tear_down(streams)
                raise
            known = self._is_known(why)
            self._session.lost(why)  # first of all nobody waits any more, and nothing can start
            self._changed.set()
            await self._tear_down(streams)
            if not known:
                self._tell_lost(why)
            if attached_s is not None and time.monotonic() - attached_s > LASTED_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _serve(self, streams: list[_Stream]) -> None:
        """Keeps the session alive until it ends by an exception."""
        assert self._side is not None
        retry_s = 0.0  # of the monotonic clock
        while True:
            wait_s = IDLE_WAIT_S
            if self._session.memory.wants_release:
                await self._perform(unregister(self._session), streams)
            if self._session.memory.wants_registration and time.monotonic() >= retry_s:
                try:
                    await self._perform(register(self._session, self._doorbells), streams)
                except NotRegisteredError as error:
                    retry_s = time.monotonic() + error.retry_s
                    self._report(error)
            if self._session.wants_index:
                await self._perform(open_index(self._session), streams)
            if self._session.memory.wants_registration:
                wait_s = max(0.0, retry_s - time.monotonic())
            wait_s = min(wait_s, self._session.tick())
            self._wake_writer()
            self._changed.set()
            if self._session.take_ready():
                self._tell_ready()
            if await self._readable(self._side, wait_s):
                await asyncio.sleep(EVENT_POLL_S)  # the stream may bring the reason
                self._session.tick()
                raise ConnectionLostError("the daemon closed the side socket")

    async def _readable(self, side: SideSocket, timeout_s: float) -> bool:
        """Waits for news, at most `timeout_s`: True if they came on the idle side socket."""
        readable = asyncio.Event()

        def on_readable() -> None:
            readable.set()
            self._wake.set()

        self._loop.add_reader(side.fileno(), on_readable)
        try:
            await _until(self._wake, timeout_s)
        finally:
            self._loop.remove_reader(side.fileno())
        self._wake.clear()
        return readable.is_set()

    async def _perform(self, steps: Steps, streams: list[_Stream]) -> None:
        """Performs all steps. Raises what comes out of them."""
        result: Any = None
        error: Exception | None = None
        try:
            while True:
                try:
                    step = steps.send(result) if error is None else steps.throw(error)
                except StopIteration:
                    return
                result = error = None
                try:
                    result = await self._perform_one(step, streams)
                except Exception as caught:  # the steps may know what to do
                    error = caught
        finally:  # if this task is cancelled
            steps.close()

    async def _perform_one(self, step: Step, streams: list[_Stream]) -> Any:
        match step:
            case SideCall():
                assert self._side is not None
                return await self._call_side(self._side, step)
            case Work():
                done = _in_thread(self._loop, step.call)
                try:
                    while not done.done():
                        await asyncio.wait([done], timeout=self._keep_alive())
                    return done.result()
                finally:
                    done.cancel()  # nobody asks for what still comes
            case OpenStream():
                streams.append(self._open_stream())
                await _until(step.record.event, step.timeout_s)
                return None

    def _keep_alive(self) -> float:
        """Called again and again while steps are performed, which may take longer than the daemon's patience.
        Returns the seconds until the next call must come."""
        if self._session.epoch is None:
            return IDLE_WAIT_S
        wait_s = self._session.tick()
        self._wake_writer()
        return wait_s

    async def _call_side(self, side: SideSocket, call: SideCall) -> SideReply:
        request = side.prepare(call)
        loop, ready = self._loop, asyncio.Event()
        try:
            async with asyncio.timeout(call.timeout_s):
                while not side.try_send(request, call.fds):
                    loop.add_writer(side.fileno(), ready.set)
                    await _until(ready, self._keep_alive())
                    loop.remove_writer(side.fileno())
                    ready.clear()
                while (reply := side.try_receive(request.id)) is None:
                    loop.add_reader(side.fileno(), ready.set)
                    await _until(ready, self._keep_alive())
                    loop.remove_reader(side.fileno())
                    ready.clear()
                return reply
        except TimeoutError:
            raise ConnectionLostError("the daemon does not answer on the side socket") from None
        finally:
            loop.remove_writer(side.fileno())
            loop.remove_reader(side.fileno())

    def _open_stream(self) -> _Stream:
        channel = grpc.aio.insecure_channel(self.address.target, options=CHANNEL_OPTIONS)
        stub: Any = cache_pb2_grpc.CacheStub(channel)
        stream = _Stream(channel, stub.Attach())
        stream.tasks.append(self._loop.create_task(self._write(stream), name="kvtier-writer"))
        stream.tasks.append(self._loop.create_task(self._read(stream), name="kvtier-stream"))
        return stream

    async def _tear_down(self, streams: list[_Stream]) -> None:
        if self._side is not None:  # before anything that waits: this is what ends the session
            self._side.close()
        for stream in streams:
            stream.call.cancel()
            for task in stream.tasks:
                task.cancel()
            await asyncio.wait(stream.tasks, timeout=STREAM_JOIN_S)
            await stream.channel.close()
            # gRPC's objects must be gone before the interpreter ends, or some versions hang then: tracebacks
            # of the ended tasks hold the stream, so the stream holds nothing.
            stream.call = stream.channel = None
            stream.tasks.clear()

    # --- the stream's tasks ---

    async def _write(self, stream: _Stream) -> None:
        try:
            while True:
                for message in self._session.take_outgoing():
                    await stream.call.write(message)
                self._outgoing.clear()
                await self._outgoing.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader learns why

    async def _read(self, stream: _Stream) -> None:
        why = "the daemon closed the stream"
        try:
            while (message := await stream.call.read()) is not grpc.aio.EOF:
                self._session.receive(message)
                self._wake_writer()
                self._changed.set()
                if self._session.needs_attention:
                    self._wake.set()
            why = str(await stream.call.details()) or why
        except grpc.RpcError as error:
            why = explain_rpc_error(error, self.address.socket)
        self._session.end(why)
        self._wake.set()

    def _wake_writer(self) -> None:
        if self._session.has_outgoing:
            self._outgoing.set()

    def _wake_session(self) -> None:
        self._wake.set()

    def _ring_from_thread(self, doorbell: int, value: int) -> None:
        try:
            self._loop.call_soon_threadsafe(super()._ring_from_thread, doorbell, value)
        except RuntimeError:
            pass  # the loop is closed, and with it the client
