"""The session of one client, without any I/O: what it knows, what it has asked, and what it wants to send.

The connection (kvtier.connection.threads) feeds it messages, takes messages from it, calls `tick`, and tells
it when it is lost. The session never waits, and never fails because of the daemon. It is not thread-safe: the
connection's lock is held around every call.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event

from kvtier import transfers
from kvtier.errors import ConnectionLostError, KvtierError, Reason
from kvtier.lookups import Lease, Lookup, LookupRecord, answer_of
from kvtier.queries import Chain, GroupQuery, LookupMode, Touch, hashes_max
from kvtier.retention import Retention
from kvtier.session.attachment import Attachment
from kvtier.session.batches import in_batches
from kvtier.session.index import Index
from kvtier.session.news import News
from kvtier.session.pending import HeartbeatSent, HelloRecord, Pending, Submitted
from kvtier.session.rank_memory import RankMemory
from kvtier.spec import FEATURES, AttachSpec
from kvtier.status import ClientState, ClientStatus, Counters
from kvtier.v1 import cache_pb2
from kvtier.v1.types_pb2 import GATE_DOORBELL, GATE_NONE
from kvtier.words import Direction, Doorbell, PartRef, PartState, RankWords

SILENCE_S = 1.0
"""A daemon that has owed an answer for this long is unresponsive: nothing waits for it until it speaks."""
PATIENCE_S = 0.02
"""A lookup that is given up after this long without a word from the daemon makes the daemon unresponsive at
once. It usually answers within a millisecond."""
CARRY_OVER_S = 0.01
"""The interval at which to look for what streams still write to a page that was replaced."""
OUTGOING_MAX = 1_024
"""The most messages that wait to be sent; more are refused."""
PENDING_MAX = 8_192
"""The most requests that wait for an answer; more are refused."""
UNHURRIED_MAX = 64
"""The most messages that wait for another to go with; with one more, all are sent."""


class ProtocolState:
    """The state of one client's session. The module says how it is used."""

    def __init__(
        self,
        spec: AttachSpec,
        *,
        clock: Callable[[], float],
        make_event: Callable[[], Event],
        release: Callable[[Lease], None] | None = None,
    ) -> None:
        """`release` gives a Lookup's lease back: it calls this class's `release` with the lock held."""
        self.spec = spec.with_memory(None)
        """Who this client is. The memory that it shares is in `memory`."""
        self.words = RankWords(spec.doorbells, spec.parts)
        self.memory = RankMemory(spec, self.words)
        self.counters = Counters()
        self.ended: str | None = None
        """Why the connection is over, once that is known; the connection then calls `lost`."""
        self._clock = clock
        self._make_event = make_event
        self._release = release or self.release
        self._closed = False
        self._attachment: Attachment | None = None
        self._next_id = 1
        self._next_ticket = 1
        self._pending: dict[int, Pending] = {}
        self._outgoing: deque[cache_pb2.AttachRequest] = deque()
        self._hurried = False
        """Whether some of these are to be sent at once; if not, all of them wait for one that is."""
        self._unsent = 0
        """How many of these are to be answered, and are among `_pending` already."""
        self._lease_asked = False
        """Whether the messages to be sent next ask for a lease."""
        self._silent_since_s: float | None = None
        self._suspect = False
        self.last_error = ""
        """What went wrong last; empty if nothing ever did."""
        self._welcome: cache_pb2.Welcome | None = None
        self._daemon_pid = 0
        self._ready_epoch: int | None = None
        """The epoch of which `take_ready` has told."""
        self.news = News(spec.prefill_tokens_per_s)
        """What the daemon is told with the next heartbeat."""

    # --- what the connection does ---

    def say_hello(self, token: bytes, daemon_pid: int) -> HelloRecord:
        """Starts a new connection with its first message."""
        assert self._attachment is None
        assert not self._pending
        self.ended = None
        self._daemon_pid = daemon_pid
        self._clear_outgoing()
        record = HelloRecord(self._make_event())
        self._send(record, hello=self.spec.hello(token, self.news.prefill_tokens_per_s))
        self.news.prefill_is_news = False
        return record

    @property
    def needs_attention(self) -> bool:
        """Whether the session thread has something to do besides sending."""
        wanted = self.memory.wants_registration or self.wants_index or self._newly_ready
        return self.ended is not None or wanted

    @property
    def wants_index(self) -> bool:
        """Whether the daemon's index pages are to be asked for."""
        return self._attachment is not None and self._attachment.wants_index

    def take_ready(self) -> bool:
        """Returns whether the session has become ready. True once for each epoch."""
        newly = self._newly_ready
        if newly:
            self._ready_epoch = self.epoch
        return newly

    def begin_index(self) -> Index | None:
        """Returns the index that the pages are put into, or None without a session."""
        if self._attachment is None:
            return None
        self._attachment.index_wanted = False
        return self._attachment.index

    @property
    def has_outgoing(self) -> bool:
        """Whether there is something to send now."""
        return self._hurried

    @property
    def has_releases(self) -> bool:
        """Whether there are leases to give back. They go with any message."""
        return self._attachment is not None and self._attachment.leases.has_releases

    @property
    def has_unhurried(self) -> bool:
        """Whether messages wait for another to go with. Also right without the lock."""
        return bool(self._outgoing) and not self._hurried

    def hurry(self) -> None:
        """Has the messages that wait for another sent now."""
        self._hurried = bool(self._outgoing)

    def take_outgoing(self) -> list[cache_pb2.AttachRequest]:
        """Takes what is to be sent now, in order. The caller sends it."""
        while self.has_releases:
            self._outgoing.append(cache_pb2.AttachRequest())
            self._take_along_releases()
        messages = list(self._outgoing)
        if self._unsent and self._silent_since_s is None:
            self._silent_since_s = self._clock()
        self._clear_outgoing()
        return list(in_batches(messages)) if len(messages) > 1 else messages

    def take_lease_asked(self) -> bool:
        """Returns whether a lease was asked for since the last call, so that one may soon be given back."""
        asked, self._lease_asked = self._lease_asked, False
        return asked

    def receive(self, message: cache_pb2.AttachResponse) -> None:
        """Handles one message of the stream. Ignores what it does not expect."""
        if message.WhichOneof("body") == "batch":
            for each in message.batch.responses:
                self._take(each)
        else:
            self._take(message)

    def _take(self, message: cache_pb2.AttachResponse) -> None:
        pending = self._pending.pop(message.id, None) if message.id else None
        self._suspect = False
        answers_owed = len(self._pending) > self._unsent
        self._silent_since_s = self._clock() if answers_owed else None
        if isinstance(pending, HeartbeatSent) and self._attachment is not None:
            self._attachment.heartbeat_pending = False
        match message.WhichOneof("body"):
            case "welcome" if isinstance(pending, HelloRecord):
                self._on_welcome(pending, message.welcome)
            case "lookup" if isinstance(pending, LookupRecord):
                self._on_lookup(pending, message.lookup)
            case "prefetch" if isinstance(pending, LookupRecord):
                self._on_lookup(pending, message.prefetch)
            case "submit" if isinstance(pending, Submitted):
                self._on_submit(pending, message.submit)
            case "error" if pending is not None:
                self._on_error(pending, KvtierError.from_proto(message.error))
            case "transfer":
                self._on_transfer(message.transfer)
            case "instance" if self._attachment is not None:
                self._attachment.on_instance(message.instance)
            case "goodbye":
                self.end(f"the daemon ended the session: {KvtierError.from_proto(message.goodbye.why)}")

    def end(self, why: str) -> None:
        """Notes that the connection is over; `lost` will be called. The first reason given is kept."""
        if self.ended is None:
            self.ended = why
        for waiting in self._pending.values():
            if isinstance(waiting, HelloRecord):
                waiting.event.set()

    def tick(self) -> float:
        """Sends a heartbeat if one is due. Returns the seconds until the next call must come.

        Raises ConnectionLostError if there is no session, or the connection is known to be over.
        """
        attachment = self._attachment
        if self.ended is not None or attachment is None:
            raise ConnectionLostError(self.ended or "the session is over")
        self.words.reap()
        self.words.carry_over()
        if attachment.heartbeat_due(self._clock()):
            self._send(HeartbeatSent(), heartbeat=self.news.take())
        next_s = max(0.0, attachment.next_heartbeat_s - self._clock())
        return min(next_s, CARRY_OVER_S) if self.words.streams.behind else next_s

    def lost(self, why: str) -> None:
        """Ends all that is in flight, as a miss or as lost: the connection is over, or could not be made."""
        self.last_error = why
        self.ended = None
        attachment, self._attachment = self._attachment, None
        self.memory.attach(None)
        pending, self._pending = self._pending, {}
        self._clear_outgoing()
        self._silent_since_s, self._suspect = None, False
        self.words.end_epoch()
        for waiting in pending.values():
            if isinstance(waiting, HelloRecord):
                waiting.event.set()
            elif isinstance(waiting, LookupRecord) and not waiting.abandoned:
                waiting.end_without(KvtierError(Reason.NOT_ATTACHED, why))
        if attachment is None:
            return
        self.counters.epochs_lost += 1
        self._next_ticket = attachment.words.next_ticket
        for record in attachment.transfers.values():
            if self.spec.role.holds_rank:
                record.lost = True  # its part word tells the rest
                record.event.set()
            else:
                error = KvtierError(Reason.EPOCH_ENDED, why)
                record.end(transfers.Outcome(transfers.TransferState.FAILED, fenced=False, error=error))

    def close(self, why: str) -> None:
        """Ends the session for good; see `lost`."""
        self._closed = True
        self.lost(why)

    # --- what callers want ---

    @property
    def epoch(self) -> int | None:
        """The epoch of the session, or None without one."""
        return None if self._attachment is None else self._attachment.epoch

    @property
    def ready_epoch(self) -> int | None:
        """The epoch if the state is READY, else None. Also right in a thread that does not hold the lock,
        because it looks at one attachment only."""
        attachment = self._attachment
        if attachment is None or self._closed or self._unresponsive():
            return None
        return attachment.epoch if attachment.ready and attachment.registered else None

    @property
    def transfer_blocks_max(self) -> int:
        """The most blocks of one transfer; 0 without a session. Also right without the lock."""
        attachment = self._attachment
        return 0 if attachment is None else attachment.transfer_blocks_max

    @property
    def prefix_tokens_max(self) -> int:
        """How many tokens of a prefix fit the pool; 0 if not known or not bounded. Also right without the
        lock."""
        attachment = self._attachment
        return 0 if attachment is None else attachment.instance.prefix_tokens_max

    @property
    def state(self) -> ClientState:
        """The client's state."""
        if self._closed:
            return ClientState.CLOSED
        if self._attachment is None:
            return ClientState.CONNECTING
        if self._unresponsive():
            return ClientState.UNRESPONSIVE
        if self._attachment.ready and self._attachment.registered:
            return ClientState.READY
        return ClientState.ATTACHED

    def status(self, stream_doorbells: str = "") -> ClientStatus:
        """Returns a snapshot of the client's state."""
        attachment, welcome = self._attachment, self._welcome
        return ClientStatus(
            state=self.state,
            why=self._why_not_ready(),
            last_error=self.last_error,
            epoch=self.epoch,
            daemon_pid=self._daemon_pid or None,
            daemon_version=welcome.daemon_version if welcome else "",
            features=frozenset(welcome.features) if welcome else frozenset(),
            pool_bytes=welcome.pool_bytes if welcome else 0,
            prefix_tokens_max=self.prefix_tokens_max,
            boot_nonce=welcome.boot_nonce if welcome else 0,
            layout_fingerprint=welcome.layout_fingerprint if welcome else "",
            namespace_digest=attachment.instance.namespace_digest if attachment else "",
            missing_ranks=tuple(attachment.instance.missing_ranks) if attachment else (),
            transfers_active=len(attachment.transfers) if attachment else 0,
            leases=len(attachment.leases) if attachment else 0,
            stream_doorbells=stream_doorbells,
            counters=dataclasses.replace(self.counters),
        )

    def lookup(
        self,
        hashes: bytes,
        queries: Sequence[GroupQuery],
        *,
        lease: bool,
        host_only: bool = False,
        again: bool = False,
    ) -> LookupRecord:
        """Sends a lookup. The record's event is set with the answer, at once if it is known already."""
        self.counters.lookups += 1
        self._lease_asked |= lease
        record, asked = self._admit(hashes, queries, counts=True)
        if asked:
            wire = [query.to_proto() for query in queries]
            body = cache_pb2.LookupRequest(
                queries=wire, hashes=asked, lease=lease, host_only=host_only, again=again
            )
            self._send(record, lookup=body)
        return record

    def prefetch(self, hashes: bytes, queries: Sequence[GroupQuery]) -> LookupRecord:
        """Sends a prefetch. The answer comes as for a lookup."""
        record, asked = self._admit(hashes, queries, counts=False)
        if asked:
            wire = [query.to_proto() for query in queries]
            self._send(record, prefetch=cache_pb2.PrefetchRequest(queries=wire, hashes=asked))
        return record

    def _admit(
        self, hashes: bytes, queries: Sequence[GroupQuery], *, counts: bool
    ) -> tuple[LookupRecord, bytes]:
        """Returns a record, and the hashes to ask about; what lies beyond them is a miss. Without hashes to
        ask about, the record has ended already."""
        record = LookupRecord(queries, self._make_event(), self._clock(), counts)
        attachment, error = self._attachment, None
        if hashes and (error := self._why_not_now()) is None and attachment is not None:
            hash_bytes = self.spec.namespace.hash_bytes
            count, most = len(hashes) // hash_bytes, hashes_max(queries, attachment.lookup_hashes_max)
            if count <= most:
                return record, hashes
            if most and queries[0].mode is LookupMode.PREFIX:
                return record, hashes[: most * hash_bytes]
            message = f"{count} hashes; the daemon takes {most} at once: split it"
            error = KvtierError(Reason.TOO_MANY_BLOCKS, message, field="hashes", value=count)
        if error is not None:
            self.counters.lookups_unanswered += counts
        record.end_without(error)
        return record, b""

    def known_run(
        self, group: int, hashes: Sequence[bytes], first: int, end: int, *, counted: bool
    ) -> int | None:
        """As `Index.known_run`; None also if the daemon would not answer now. If no block is known, this is
        reported as a lookup, unless it is not `counted`."""
        attachment = self._attachment
        if attachment is None or self.state is not ClientState.READY:
            return None
        known = attachment.index.known_run(group, hashes, first, end)
        if known == 0 and counted:
            self.counters.lookups_local += 1
            self.news.spared(max(0, min(end, len(hashes)) - first))
        return known

    def knows_any(self, group: int, hashes: Sequence[bytes]) -> bool | None:
        """As `Index.knows_any`; None also if the daemon would not answer now."""
        attachment = self._attachment
        if attachment is None or self.state is not ClientState.READY:
            return None
        return attachment.index.knows_any(group, hashes)

    def abandon(self, record: LookupRecord) -> Lookup:
        """Gives a lookup up. Returns its answer if it has come, else a miss.

        A lease that comes later is released. If the daemon has said nothing since, other lookups do not wait
        for it until it does.
        """
        if record.answer is not None:
            return record.answer
        record.abandoned = True
        self.counters.lookups_unanswered += record.counts
        silent = self._silent_since_s is not None and self._silent_since_s <= record.sent_s
        if silent and self._clock() - record.sent_s >= PATIENCE_S:
            self._suspect = True
        return record.end_without(KvtierError(Reason.DEADLINE, "the daemon did not answer in time"))

    def touch(self, touch: Touch, *, lazily: bool = False) -> None:
        """Tells the daemon which blocks to keep longer, or to evict first. Has no effect if it cannot be told
        now. If `lazily`, it is sent with the next message, which may be a heartbeat."""
        attachment = self._attachment
        if not touch.hashes or attachment is None or self._why_not_now() is not None:
            return
        request = touch.to_proto(self.spec.namespace.hash_bytes, attachment.lookup_hashes_max)
        (self._send_lazily if lazily else self._send)(None, touch=request)

    def store(
        self,
        group: int,
        hashes: bytes,
        block_ids: list[int],
        doorbell: Doorbell | None,
        retention: Retention | None = None,
        *,
        lazily: bool = False,
        chains: Sequence[Chain] = (),
    ) -> transfers.TransferRecord:
        """Submits a store of as many hashes as block ids, which are checked already. If `lazily`, its message
        may be sent with the next one, and its end be reported a little later, with that of others."""
        self.counters.stores += 1
        record, signals = self._submit("store", len(block_ids), doorbell, None)
        if record.part is not None:
            request = {
                "signals": signals,
                "group": group,
                "hashes": hashes,
                "block_ids": block_ids,
                "retention": None if retention is None or retention.plain else retention.to_proto(),
                "lazily": lazily,
                "chains": [{"blocks": chain.blocks, "previous_hash": chain.previous} for chain in chains],
            }
            send = self._send_lazily if lazily else self._send
            send(Submitted(record, record.part.ticket), store=request)
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
    ) -> transfers.TransferRecord:
        """Submits a load of blocks of a lease. The arguments are checked already."""
        self.counters.loads += 1
        attachment, error = self._attachment, None
        if (
            attachment is None
            or lease.epoch != attachment.epoch
            or not attachment.leases.held(lease.lease_id)
        ):
            message = "the lease is of an earlier epoch, released, or used by another load: look up again"
            error = KvtierError(Reason.UNKNOWN_LEASE, message, field="lease", value=lease.lease_id)
        record, signals = self._submit("load", len(block_ids), doorbell, error)
        if record.part is not None and attachment is not None:
            request = {
                "signals": signals,
                "group": group,
                "lease_id": lease.lease_id,
                "first": first,
                "block_ids": block_ids,
                "keep_lease": keep_lease,
            }
            if not keep_lease:
                attachment.leases.load(lease.lease_id)
            pending = Submitted(record, record.part.ticket, 0 if keep_lease else lease.lease_id)
            self._send(pending, load=request)
        return record

    def release(self, lease: Lease) -> None:
        """Gives a lease back, now or when the load that uses it is refused. Safe to call twice."""
        if self._attachment is not None and lease.epoch == self._attachment.epoch:
            self._attachment.leases.release(lease.lease_id)

    def cancel(self, record: transfers.TransferRecord) -> None:
        """Asks the daemon to end a transfer early. Its outcome still comes."""
        attachment, part = self._attachment, record.part
        if attachment is None or part is None or attachment.transfers.get(part.ticket) is not record:
            return
        if len(self._outgoing) < OUTGOING_MAX:
            self._send(None, cancel=cache_pb2.CancelRequest(tickets=[part.ticket]))

    def outcome(self, record: transfers.TransferRecord) -> transfers.Outcome:
        """Returns how a transfer stands: what the daemon reported or, for a client with a rank, what its part
        word says."""
        part = record.part
        if record.outcome is not transfers.ACTIVE or part is None or not self.spec.role.holds_rank:
            return record.outcome
        state = self.words.state(part)
        if not state.over:
            return transfers.ACTIVE
        if state is PartState.DONE and part.direction == "load":
            record.outcome = transfers.Outcome(
                transfers.TransferState.DONE, fenced=True, succeeded=b"\1" * record.count
            )
        elif record.lost:
            message = f"the daemon went away before it reported the end: {self.last_error}"
            error = KvtierError(Reason.EPOCH_ENDED, message)
            record.outcome = transfers.Outcome(transfers.TransferState.FAILED, fenced=True, error=error)
        else:  # the daemon will report how it ended; the blocks may be reused already
            return transfers.Outcome(transfers.TransferState.ACTIVE, fenced=True)
        return record.outcome

    # --- inside ---

    @property
    def _newly_ready(self) -> bool:
        return self.state is ClientState.READY and self.epoch != self._ready_epoch

    def _send(self, pending: Pending | None, **body: object) -> None:
        """Queues a message that is sent at once. `pending` takes its answer; None asks for none."""
        self._queue(pending, body)
        self._take_along_releases()
        self._hurried = True
        if pending is not None and self._silent_since_s is None:
            self._silent_since_s = self._clock()

    def _send_lazily(self, pending: Pending | None, **body: object) -> None:
        """Queues a message that is sent with the next one."""
        if len(self._outgoing) < UNHURRIED_MAX:
            self._queue(pending, body)
        else:
            self._send(pending, **body)

    def _queue(self, pending: Pending | None, body: dict[str, object]) -> None:
        """`body` has one message, or a dict of its fields: protobuf copies a message that is put into another
        one, which takes longer than making it."""
        request_id = 0 if pending is None else self._next_id
        self._outgoing.append(cache_pb2.AttachRequest(id=request_id, **body))  # type: ignore[arg-type]
        if pending is not None:
            self._pending[request_id] = pending
            self._unsent += 1
            self._next_id += 1

    def _take_along_releases(self) -> None:
        """Has the last message give back what was released before it: leases are bounded, and it may ask for
        another. The messages before it may still use them."""
        if self.has_releases and self._attachment is not None:
            self._outgoing[-1].released_leases.extend(self._attachment.leases.take_releases())

    def _clear_outgoing(self) -> None:
        self._outgoing.clear()
        self._hurried = False
        self._unsent = 0

    def _submit(
        self, direction: Direction, count: int, doorbell: Doorbell | None, problem: KvtierError | None
    ) -> tuple[transfers.TransferRecord, dict[str, int]]:
        """Returns a record, and the fields of the signals to submit it with. Without a part it has ended
        already."""
        record = transfers.TransferRecord(direction, count, self._make_event())
        attachment = self._attachment
        if count == 0:
            record.end(transfers.Outcome(transfers.TransferState.DONE, fenced=True))
            return record, {}
        problem = self._why_not_now() or problem
        if problem is None and attachment is not None:
            if count > (most := attachment.transfer_blocks_max):
                message = f"{count} blocks; the daemon takes {most} in one transfer: split it"
                problem = KvtierError(Reason.TOO_MANY_BLOCKS, message, field="block_ids", value=count)
            elif len(attachment.transfers) >= attachment.welcome.limits.transfers_max:
                problem = KvtierError(Reason.QUEUE_FULL, "too many transfers are in flight: wait for one")
            elif (taken := attachment.words.take()) is None:
                problem = KvtierError(Reason.QUEUE_FULL, "every part word is in use: wait for one")
            else:
                ticket, word = taken
                record.part = PartRef(attachment.epoch, ticket, word, direction)
                attachment.transfers[ticket] = record
                signals: dict[str, int] = {"ticket": ticket, "part_word": word, "gate": GATE_NONE}
                if doorbell is not None:
                    signals |= {
                        "gate": GATE_DOORBELL,
                        "doorbell": doorbell.index,
                        "doorbell_value": doorbell.value,
                    }
                return record, signals
        assert problem is not None
        self.counters.submits_refused += 1
        record.end(transfers.refused(problem))
        return record, {}

    def _on_welcome(self, hello: HelloRecord, welcome: cache_pb2.Welcome) -> None:
        if missing := sorted(set(FEATURES).difference(welcome.features)):
            self.end(
                f"kvtierd {welcome.daemon_version} lacks what this client needs ({', '.join(missing)}): "
                "use a daemon of the client's version"
            )
            hello.event.set()
            return
        self._welcome = welcome
        self._attachment = Attachment(self.spec, welcome, self._next_ticket, self._clock())
        self.memory.attach(self._attachment)
        self.words.begin_epoch(welcome.epoch)
        self.counters.epochs += 1
        hello.welcomed = True
        hello.event.set()

    def _on_lookup(
        self, record: LookupRecord, response: cache_pb2.LookupResponse | cache_pb2.PrefetchResponse
    ) -> None:
        assert self._attachment is not None
        if len(response.answers) != len(record.queries):
            said = f"the daemon sent {len(response.answers)} answers to {len(record.queries)} queries"
            self._on_error(record, KvtierError(Reason.MALFORMED, said))
            return
        answer = answer_of(response, record.queries, self._attachment.epoch, self._release)
        for lease in answer.leases:
            self._attachment.leases.add(lease.lease_id)
        if record.abandoned:
            for lease in answer.leases:
                self.release(lease)
            return
        if record.counts:
            self.counters.blocks_hit += answer.hits
        if answer.error is not None:
            self.last_error = str(answer.error)
        record.took_s = self._clock() - record.sent_s
        record.end(answer)

    def _on_submit(self, submitted: Submitted, response: cache_pb2.SubmitResponse) -> None:
        record = submitted.record
        record.accepted = True
        record.results = response.results
        record.number = response.transfer.boot_nonce, response.transfer.number
        if self._attachment is not None:
            self._attachment.leases.consumed(submitted.lease_id)

    def _on_error(self, pending: Pending, error: KvtierError) -> None:
        self.last_error = str(error)
        match pending:
            case HelloRecord():
                pending.error = error
                pending.event.set()
            case LookupRecord() if not pending.abandoned:
                self.counters.lookups_unanswered += pending.counts
                pending.end_without(error)
            case Submitted() if error.reason is Reason.INTERNAL:
                # This is no refusal, which would mean that nothing changed: some ranks may have their parts
                # already.
                self.end(str(error))
            case Submitted() if self._attachment is not None:
                self._attachment.leases.refused(pending.lease_id)
                if (record := self._end_transfer(pending.ticket)) is not None:
                    self.counters.submits_refused += 1
                    record.end(transfers.refused(error))
            case _:
                pass

    def _on_transfer(self, event: cache_pb2.TransferEvent) -> None:
        record = self._end_transfer(event.ticket)
        if record is None:
            return
        outcome = transfers.outcome_of(event)
        if outcome.done:
            self.counters.transfers_done += 1
        else:
            self.counters.transfers_failed += 1
            self.last_error = str(outcome.error)
        record.end(outcome)

    def _end_transfer(self, ticket: int) -> transfers.TransferRecord | None:
        """Takes out a transfer that is over: its parts are fenced on every rank, so its word is free."""
        attachment = self._attachment
        record = attachment.transfers.pop(ticket, None) if attachment is not None else None
        if attachment is not None and record is not None and record.part is not None:
            attachment.words.give_back(record.part.word)
        return record

    def _unresponsive(self) -> bool:
        if self._suspect:
            return True
        since_s = self._silent_since_s
        return since_s is not None and self._clock() - since_s > SILENCE_S

    def _why_not_ready(self) -> str:
        """Returns why the client is not ready, in one sentence; an empty text if it is."""
        state, attachment = self.state, self._attachment
        if state is ClientState.READY:
            return ""
        if state is ClientState.CLOSED:
            return "the client is closed"
        if attachment is None:
            return f"no connection to the daemon: {self.last_error or 'not made yet'}"
        if state is ClientState.UNRESPONSIVE:
            return "the daemon does not answer"
        if not attachment.registered:
            if self.memory.spec.memory is None:
                return "this rank has taken its memory back: register_memory brings it in again"
            if self.memory.error is not None:
                return f"this rank's memory cannot be registered: {self.memory.error}"
        instance = attachment.instance
        if ranks := sorted({*instance.missing_ranks, *instance.reregister_ranks}):
            return f"ranks {ranks} of the instance have not registered"
        return "the instance is not ready"

    def _why_not_now(self) -> KvtierError | None:
        """Returns why nothing can be asked now, or None if something can."""
        state = self.state
        if state is ClientState.READY:
            if len(self._outgoing) < OUTGOING_MAX and len(self._pending) < PENDING_MAX:
                return None
            return KvtierError(Reason.QUEUE_FULL, "too many requests wait to be sent or answered")
        reasons = {
            ClientState.UNRESPONSIVE: Reason.DEADLINE,
            ClientState.ATTACHED: Reason.INSTANCE_INCOMPLETE,
        }
        return KvtierError(reasons.get(state, Reason.NOT_ATTACHED), self._why_not_ready())
