"""The session of one client, without any input or output: what it knows, what it has asked, what it wants to
send.

A shell (client.py, aio.py) feeds it messages, takes messages from it, calls `tick`, and tells it when the
connection is lost; it never waits and never fails because of the daemon. Not thread-safe: the shell's lock is
held around every call.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvtier.errors import ConnectionLostError, KvtierError, Reason
from kvtier.lookups import Lease, Lookup, LookupMode, LookupRecord, answer_of, unanswered
from kvtier.spec import AttachSpec
from kvtier.status import ClientState, ClientStatus, Counters
from kvtier.transfers import (
    ACTIVE,
    Event,
    Outcome,
    PartWords,
    TransferRecord,
    TransferState,
    outcome_of,
    refused,
)
from kvtier.v1 import cache_pb2
from kvtier.v1.types_pb2 import GATE_DOORBELL, GATE_NONE
from kvtier.words import Direction, PartRef, PartState, RankWords, WordsPage

SILENCE_S = 1.0
"""An attached daemon that owes an answer for this long is unresponsive: nothing waits for it until it speaks
again."""
OUTGOING_MAX = 1_024
"""Messages that wait to be sent; more are refused."""
PENDING_MAX = 8_192
"""Requests that wait for an answer; more are refused."""
RELEASES_MAX = 65_536
"""Leases that wait to be released; more are left to expire."""
RELEASE_BATCH = 4_096
HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 0.05, 60.0
IDLE_TICK_S = 60.0


@dataclass(slots=True, eq=False)
class HelloRecord:
    """A Hello on its way."""

    event: Event
    welcomed: bool = False
    error: KvtierError | None = None


@dataclass(frozen=True, slots=True)
class Doorbell:
    """A part starts when the doorbell word `index` of its rank has reached `value`."""

    index: int
    value: int


@dataclass(slots=True)
class _Epoch:
    """What is known of one attachment."""

    epoch: int
    limits: cache_pb2.Limits
    instance: cache_pb2.InstanceEvent
    words: PartWords
    registered: bool
    next_heartbeat_s: float
    reregistered: bool = False
    """We registered again, and no InstanceEvent has yet said so: older ones still ask us to."""


class _LeaseState(Enum):
    HELD = 0
    LOADING = 1
    """Named by a load that is not accepted yet, and will consume it."""
    RELEASE = 2
    """The same, and to be released if that load is refused."""


class _Ignored:
    """Stands for a request whose answer says nothing."""


class _Heartbeat:
    """Stands for a heartbeat on its way."""


@dataclass(slots=True, eq=False)
class _Submitted:
    record: TransferRecord
    ticket: int
    lease_id: int = 0


_Pending = HelloRecord | LookupRecord | _Submitted | _Ignored | _Heartbeat


class Session:
    """See the module."""

    def __init__(
        self,
        spec: AttachSpec,
        *,
        clock: Callable[[], float],
        make_event: Callable[[], Event],
        release: Callable[[Lease], None] | None = None,
    ) -> None:
        """`release`: what a Lookup calls to give its lease back: `release` below under the shell's lock."""
        self.spec = spec
        self.words = RankWords(spec.doorbells, spec.parts)
        self.counters = Counters()
        self.ended: str | None = None
        """Why the connection is over, once the daemon has said so; the shell then calls `lost`."""
        self._clock = clock
        self._make_event = make_event
        self._release = release or self.release
        self._closed = False
        self._epoch: _Epoch | None = None
        self._next_id = 1
        self._next_ticket = 1
        self._pending: dict[int, _Pending] = {}
        self._outgoing: deque[cache_pb2.AttachRequest] = deque()
        self._releases: deque[int] = deque()
        self._leases: dict[int, _LeaseState] = {}
        self._transfers: dict[int, TransferRecord] = {}
        self._heartbeats = 0
        self._silent_since_s: float | None = None
        self._suspect = False
        self._last_error = ""
        self._welcome: cache_pb2.Welcome | None = None
        self._daemon_pid = 0

    # --- what the shell does for the connection
    # -----------------------------------------------------------------------

    def say_hello(self, token: bytes, daemon_pid: int) -> HelloRecord:
        """Starts a new connection with its first message."""
        assert self._epoch is None
        assert not self._pending
        self.ended = None
        self._daemon_pid = daemon_pid
        self._outgoing.clear()
        record = HelloRecord(self._make_event())
        self._send(record, hello=self.spec.hello(token))
        return record

    def take_outgoing(self) -> list[cache_pb2.AttachRequest]:
        """What is to be sent now, in order. The caller sends it."""
        messages = list(self._outgoing)
        self._outgoing.clear()
        while self._releases and len(self._pending) < PENDING_MAX:
            batch = [self._releases.popleft() for _ in range(min(len(self._releases), RELEASE_BATCH))]
            self._send(_Ignored(), release=cache_pb2.ReleaseRequest(lease_ids=batch))
            messages.append(self._outgoing.pop())
        return messages

    @property
    def has_outgoing(self) -> bool:
        """Whether `take_outgoing` has something."""
        return bool(self._outgoing) or bool(self._releases)

    def receive(self, message: cache_pb2.AttachResponse) -> None:
        """One message of the stream. What it does not expect it ignores."""
        pending = self._pending.pop(message.id, None) if message.id else None
        self._suspect = False
        self._silent_since_s = self._clock() if self._pending else None
        match message.WhichOneof("body"):
            case "welcome" if isinstance(pending, HelloRecord):
                self._on_welcome(pending, message.welcome)
            case "heartbeat_ack" if isinstance(pending, _Heartbeat):
                self._heartbeats -= 1
            case "lookup" if isinstance(pending, LookupRecord):
                self._on_lookup(pending, message.lookup)
            case "submit" if isinstance(pending, _Submitted):
                self._on_submit(pending, message.submit)
            case "error" if pending is not None:
                self._on_error(pending, KvtierError.from_proto(message.error))
            case "transfer":
                self._on_transfer(message.transfer)
            case "instance":
                self._on_instance(message.instance)
            case "goodbye":
                self.end(f"the daemon ended the session: {KvtierError.from_proto(message.goodbye.why)}")

    def end(self, why: str) -> None:
        """The connection is known to be over; the shell will call `lost`. The first reason given is kept."""
        if self.ended is None:
            self.ended = why
        for waiting in self._pending.values():
            if isinstance(waiting, HelloRecord):
                waiting.event.set()

    def tick(self) -> float:
        """Sends a heartbeat if one is due. Returns the seconds until the next call must come.

        Raises ConnectionLostError if the daemon has ended the session.
        """
        if self.ended is not None:
            raise ConnectionLostError(self.ended)
        self.words.reap()
        epoch = self._epoch
        if epoch is None:
            return IDLE_TICK_S
        now_s = self._clock()
        if now_s >= epoch.next_heartbeat_s:
            if not self._heartbeats:
                self._heartbeats = 1
                self._send(_Heartbeat(), heartbeat=cache_pb2.Heartbeat())
            epoch.next_heartbeat_s = now_s + _heartbeat_interval_s(epoch.limits)
        return max(0.0, epoch.next_heartbeat_s - now_s)

    @property
    def wants_registration(self) -> bool:
        """Whether the steps of `attach.register` are due."""
        return self._epoch is not None and self.spec.role.holds_rank and not self._epoch.registered

    def new_page(self) -> WordsPage:
        """A page of words for the registration that starts now."""
        return self.words.new_page()

    def registered(self) -> None:
        """Words and memory are registered."""
        if self._epoch is not None:
            self._epoch.reregistered = self.spec.rank in self._epoch.instance.reregister_ranks
            self._epoch.registered = True
            self.counters.registrations += 1

    def lost(self, why: str) -> None:
        """The connection is over, or could not be made: what is in flight ends, as a miss or as lost."""
        self._last_error = why
        self.ended = None
        was_attached = self._epoch is not None
        if self._epoch is not None:
            self._next_ticket = self._epoch.words.next_ticket
            self.counters.epochs_lost += 1
        self._epoch = None
        self.words.end_epoch()
        pending, self._pending = self._pending, {}
        transfers, self._transfers = self._transfers, {}
        self._outgoing.clear()
        self._releases.clear()
        self._leases.clear()
        self._heartbeats = 0
        self._silent_since_s, self._suspect = None, False
        for waiting in pending.values():
            if isinstance(waiting, HelloRecord):
                waiting.event.set()
            elif isinstance(waiting, LookupRecord):
                waiting.end(unanswered(Reason.NOT_ATTACHED, why))
        for record in transfers.values():
            if self.spec.role.holds_rank:
                record.lost = True
                record.event.set()
            else:
                record.end(
                    Outcome(TransferState.FAILED, fenced=False, error=KvtierError(Reason.EPOCH_ENDED, why))
                )
        assert was_attached or not transfers

    def close(self, why: str) -> None:
        """As `lost`, for good."""
        self._closed = True
        self.lost(why)

    # --- what callers want
    # --------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int | None:
        """The epoch of the session, None without one."""
        return None if self._epoch is None else self._epoch.epoch

    @property
    def state(self) -> ClientState:
        """See ClientState."""
        if self._closed:
            return ClientState.CLOSED
        if self._epoch is None:
            return ClientState.CONNECTING
        if self._unresponsive():
            return ClientState.UNRESPONSIVE
        if self._epoch.instance.ready and not self.wants_registration:
            return ClientState.READY
        return ClientState.ATTACHED

    def status(self) -> ClientStatus:
        """A snapshot."""
        epoch, welcome = self._epoch, self._welcome
        return ClientStatus(
            state=self.state,
            why=self._why_not(),
            last_error=self._last_error,
            epoch=epoch.epoch if epoch else None,
            daemon_pid=self._daemon_pid or None,
            daemon_version=welcome.daemon_version if welcome else "",
            boot_nonce=welcome.boot_nonce if welcome else 0,
            layout_fingerprint=welcome.layout_fingerprint if welcome else "",
            namespace_digest=epoch.instance.namespace_digest if epoch else "",
            missing_ranks=tuple(epoch.instance.missing_ranks) if epoch else (),
            transfers_active=len(self._transfers),
            leases=len(self._leases),
            counters=dataclasses.replace(self.counters),
        )

    def lookup(self, group: int, hashes: bytes, mode: LookupMode, *, lease: bool) -> LookupRecord:
        """Asks; the record's event is set with the answer, at once if it is known already."""
        record = LookupRecord(self._make_event(), self._clock())
        self.counters.lookups += 1
        count = len(hashes) // self.spec.namespace.hash_bytes
        if count == 0:
            record.end(Lookup(answered=True))
            return record
        error = self._why_not_now()
        epoch = self._epoch
        if error is not None or epoch is None:
            self.counters.lookups_unanswered += 1
            record.end(Lookup(error=error))
            return record
        if count > epoch.limits.lookup_hashes_max > 0:
            if mode is not LookupMode.PREFIX:
                self.counters.lookups_unanswered += 1
                most = epoch.limits.lookup_hashes_max
                message = f"{count} hashes; the daemon takes {most} in one lookup: split it"
                record.end(unanswered(Reason.TOO_MANY_BLOCKS, message))
                return record
            hashes = hashes[: epoch.limits.lookup_hashes_max * self.spec.namespace.hash_bytes]
        query = cache_pb2.GroupQuery(
            group=group, mode=cache_pb2.LookupMode.ValueType(mode.value), hashes=hashes
        )
        self._send(record, lookup=cache_pb2.LookupRequest(queries=[query], lease=lease))
        return record

    def abandon(self, record: LookupRecord) -> Lookup:
        """Nobody waits for this lookup any more. Returns its answer if it has come, else that none has.

        A lease that comes later is released. Until the daemon says something, other lookups do not wait for
        it.
        """
        if record.answer is not None:
            return record.answer
        record.abandoned = True
        self.counters.lookups_unanswered += 1
        if self._silent_since_s is not None and self._silent_since_s <= record.sent_s:
            self._suspect = True
        answer = unanswered(Reason.DEADLINE, "the daemon did not answer in time")
        record.end(answer)
        return answer

    def store(
        self, group: int, hashes: bytes, block_ids: list[int], doorbell: Doorbell | None
    ) -> TransferRecord:
        """Submits a store of as many hashes as block ids. The arguments are checked already."""
        self.counters.stores += 1
        record, signals = self._submit("store", len(block_ids), doorbell)
        if signals is not None:
            request = cache_pb2.StoreRequest(signals=signals, group=group, hashes=hashes, block_ids=block_ids)
            self._send(_Submitted(record, signals.ticket), store=request)
        return record

    def load(
        self,
        group: int,
        lease: Lease,
        first: int,
        block_ids: list[int],
        doorbell: Doorbell | None,
        *,
        keep_lease: bool,
    ) -> TransferRecord:
        """Submits a load of blocks of a lease. The arguments are checked already."""
        self.counters.loads += 1
        lease_error = None
        if self._leases.get(lease.lease_id) is not _LeaseState.HELD or lease.epoch != self.epoch:
            message = (
                "the lease is of an earlier epoch, was released, or is used by another load: look up again"
            )
            lease_error = KvtierError(Reason.UNKNOWN_LEASE, message, field="lease", value=lease.lease_id)
        record, signals = self._submit("load", len(block_ids), doorbell, lease_error)
        if signals is not None:
            request = cache_pb2.LoadRequest(
                signals=signals,
                group=group,
                lease_id=lease.lease_id,
                first=first,
                block_ids=block_ids,
                keep_lease=keep_lease,
            )
            if not keep_lease:
                self._leases[lease.lease_id] = _LeaseState.LOADING
            self._send(_Submitted(record, signals.ticket, 0 if keep_lease else lease.lease_id), load=request)
        return record

    def release(self, lease: Lease) -> None:
        """Gives a lease back, now or when the load that names it is refused. Idempotent."""
        if self._epoch is None or lease.epoch != self._epoch.epoch:
            return
        match self._leases.get(lease.lease_id):
            case _LeaseState.HELD:
                del self._leases[lease.lease_id]
                if len(self._releases) < RELEASES_MAX:
                    self._releases.append(lease.lease_id)
            case _LeaseState.LOADING:
                self._leases[lease.lease_id] = _LeaseState.RELEASE

    def cancel(self, record: TransferRecord) -> None:
        """Asks the daemon to end a transfer early; its outcome still comes."""
        part = record.part
        if part is not None and part.ticket in self._transfers and len(self._outgoing) < OUTGOING_MAX:
            self._send(_Ignored(), cancel=cache_pb2.CancelRequest(tickets=[part.ticket]))

    def outcome(self, record: TransferRecord) -> Outcome:
        """How a transfer stands: what the daemon reported or, for a client with a rank, what its part word
        says."""
        part = record.part
        if record.outcome is not ACTIVE or part is None or not self.spec.role.holds_rank:
            return record.outcome
        state = self.words.state(part)
        if not state.over:
            return ACTIVE
        if state is PartState.DONE and part.direction == "load":
            record.outcome = Outcome(TransferState.DONE, fenced=True, succeeded=b"\1" * record.count)
        elif record.lost:
            message = f"the daemon went away before it reported the end: {self._last_error}"
            error = KvtierError(Reason.EPOCH_ENDED, message)
            record.outcome = Outcome(TransferState.FAILED, fenced=True, error=error)
        else:  # the daemon will say what became of it; the blocks may be reused already
            return Outcome(TransferState.ACTIVE, fenced=True)
        return record.outcome

    # --- inside
    # -------------------------------------------------------------------------------------------------------

    def _send(self, pending: _Pending, **body: object) -> None:
        message = cache_pb2.AttachRequest(id=self._next_id, **body)  # type: ignore[arg-type]
        self._pending[self._next_id] = pending
        self._next_id += 1
        self._outgoing.append(message)
        if self._silent_since_s is None:
            self._silent_since_s = self._clock()

    def _submit(
        self, direction: Direction, count: int, doorbell: Doorbell | None, problem: KvtierError | None = None
    ) -> tuple[TransferRecord, cache_pb2.Signals | None]:
        record = TransferRecord(direction, count, self._make_event())
        if count == 0:
            record.end(Outcome(TransferState.DONE, fenced=True))
            return record, None
        error, epoch = self._why_not_now() or problem, self._epoch
        if error is None and epoch is not None:
            if count > epoch.limits.transfer_blocks_max > 0:
                most = epoch.limits.transfer_blocks_max
                message = f"{count} blocks; the daemon takes {most} in one transfer: split it"
                error = KvtierError(Reason.TOO_MANY_BLOCKS, message, field="block_ids", value=count)
            elif len(self._transfers) >= epoch.limits.transfers_max > 0:
                error = KvtierError(
                    Reason.QUEUE_FULL, "too many transfers are in flight: wait for one of them"
                )
            elif (taken := epoch.words.take()) is None:
                error = KvtierError(
                    Reason.QUEUE_FULL, "every part word is in use: wait for a transfer to end"
                )
            else:
                ticket, word = taken
                record.part = PartRef(epoch.epoch, ticket, word, direction)
                self._transfers[ticket] = record
                signals = cache_pb2.Signals(
                    ticket=ticket, part_word=word, gate=GATE_DOORBELL if doorbell else GATE_NONE
                )
                if doorbell is not None:
                    signals.doorbell, signals.doorbell_value = doorbell.index, doorbell.value
                return record, signals
        assert error is not None
        self.counters.submits_refused += 1
        record.end(refused(error))
        return record, None

    def _on_welcome(self, hello: HelloRecord, welcome: cache_pb2.Welcome) -> None:
        if self._closed:
            return
        instance = cache_pb2.InstanceEvent()
        instance.CopyFrom(welcome.instance)
        self._welcome = welcome
        self._epoch = _Epoch(
            epoch=welcome.epoch,
            limits=welcome.limits,
            instance=instance,
            words=PartWords(self.spec.parts, self._next_ticket),
            registered=False,
            next_heartbeat_s=self._clock() + _heartbeat_interval_s(welcome.limits),
        )
        self.words.begin_epoch(welcome.epoch)
        self.counters.epochs += 1
        hello.welcomed = True
        hello.event.set()

    def _on_lookup(self, record: LookupRecord, response: cache_pb2.LookupResponse) -> None:
        assert self._epoch is not None
        answer = answer_of(response, self._epoch.epoch, self._release)
        if answer.lease is not None:
            self._leases[answer.lease.lease_id] = _LeaseState.HELD
            if record.abandoned:
                self.release(answer.lease)
        if not record.abandoned:
            self.counters.blocks_hit += answer.hits
            if answer.error is not None:
                self._last_error = str(answer.error)
            record.end(answer)

    def _on_submit(self, submitted: _Submitted, response: cache_pb2.SubmitResponse) -> None:
        record = submitted.record
        record.accepted = True
        record.results = response.results
        record.number = response.transfer.boot_nonce, response.transfer.number
        self._leases.pop(submitted.lease_id, None)

    def _on_error(self, pending: _Pending, error: KvtierError) -> None:
        self._last_error = str(error)
        match pending:
            case HelloRecord():
                pending.error = error
                pending.event.set()
            case LookupRecord() if not pending.abandoned:
                self.counters.lookups_unanswered += 1
                pending.end(Lookup(error=error))
            case _Submitted():
                self._on_submit_refused(pending, error)
            case _Heartbeat():
                self._heartbeats -= 1
            case _:
                pass

    def _on_submit_refused(self, submitted: _Submitted, error: KvtierError) -> None:
        record = submitted.record
        if self._transfers.pop(submitted.ticket, None) is None or record.part is None or self._epoch is None:
            return
        self._epoch.words.give_back(record.part.word)
        self.counters.submits_refused += 1
        record.end(refused(error))
        if (state := self._leases.get(submitted.lease_id)) is not None:
            self._leases[submitted.lease_id] = _LeaseState.HELD
            if state is _LeaseState.RELEASE:
                self.release(Lease(submitted.lease_id, self._epoch.epoch, 0))

    def _on_transfer(self, event: cache_pb2.TransferEvent) -> None:
        record = self._transfers.pop(event.ticket, None)
        if record is None or record.part is None or self._epoch is None:
            return
        self._epoch.words.give_back(record.part.word)
        outcome = outcome_of(event)
        if outcome.done:
            self.counters.transfers_done += 1
        else:
            self.counters.transfers_failed += 1
            self._last_error = str(outcome.error)
        record.end(outcome)

    def _on_instance(self, event: cache_pb2.InstanceEvent) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        epoch.instance = event
        if self.spec.role.holds_rank:
            asked = self.spec.rank in event.reregister_ranks
            if asked and epoch.registered and not epoch.reregistered:
                epoch.registered = False
            elif not asked:
                epoch.reregistered = False

    def _unresponsive(self) -> bool:
        if self._suspect:
            return True
        return self._silent_since_s is not None and self._clock() - self._silent_since_s > SILENCE_S

    def _why_not(self) -> str:
        """Why the state is not READY."""
        match self.state:
            case ClientState.READY:
                return ""
            case ClientState.CLOSED:
                return "the client is closed"
            case ClientState.CONNECTING:
                return f"no connection to the daemon: {self._last_error or 'not connected yet'}"
            case ClientState.UNRESPONSIVE:
                return "the daemon does not answer"
            case ClientState.ATTACHED:
                assert self._epoch is not None
                missing = list(self._epoch.instance.missing_ranks) or list(
                    self._epoch.instance.reregister_ranks
                )
                if missing:
                    return f"ranks {missing} of the instance have not registered"
                return "the ranks of the instance are registering"

    def _why_not_now(self) -> KvtierError | None:
        """Why nothing can be asked now; None if it can."""
        match self.state:
            case ClientState.READY if len(self._outgoing) < OUTGOING_MAX and len(self._pending) < PENDING_MAX:
                return None
            case ClientState.READY:
                return KvtierError(Reason.QUEUE_FULL, "too many requests wait to be sent or answered")
            case ClientState.UNRESPONSIVE:
                return KvtierError(Reason.DEADLINE, self._why_not())
            case ClientState.ATTACHED:
                return KvtierError(Reason.INSTANCE_INCOMPLETE, self._why_not())
            case _:
                return KvtierError(Reason.NOT_ATTACHED, self._why_not())


def _heartbeat_interval_s(limits: cache_pb2.Limits) -> float:
    """Kept between bounds, whatever a daemon asks for."""
    return min(max(limits.heartbeat_interval_ms / 1_000, HEARTBEAT_MIN_S), HEARTBEAT_MAX_S)
