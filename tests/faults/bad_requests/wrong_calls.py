"""Calls with one thing wrong: a right request of a live instance, changed so that it has to be refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from google.protobuf.message import Message
from kvtier.v1 import cache_pb2, types_pb2
from kvtierd.core.errors import Reason
from kvtierd.rpc.calls import TICKET_MAX, WAIT_TICKETS_MAX, WAIT_TIMEOUT_MS_MAX

from tests.faults.bad_requests.front import LIMITS, MESSAGE_BYTES_MAX
from tests.faults.bad_requests.guest import BATCH, BLOCKS, DOORBELLS, PARTS, Guest, Held

U32 = 2**32 - 1
U64 = 2**64 - 1
QUEUE = LIMITS.terminal_kept + LIMITS.transfers_max


@dataclass(frozen=True)
class Wrong:
    """A request that has to be refused, for one of these reasons."""

    call: str
    data: bytes
    reasons: tuple[Reason, ...]
    what: str


Change = Callable[[Any], None]
Make = Callable[[], tuple[str, Message, tuple[Reason, ...]]]


@dataclass
class WrongCalls:
    """Makes wrong calls of one guest's, who is ready; `others` are there as well."""

    guest: Guest
    others: list[Guest]
    chance: Random
    _makers: list[tuple[str, Make]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._makers = [
            (f"{maker.__name__[1:]}", maker)
            for maker in (
                self._no_session,
                self._wrong_epoch,
                self._wrong_role,
                self._queries,
                self._query,
                self._ragged_hashes,
                self._too_many_hashes,
                self._store_ids,
                self._store_signals,
                self._retention,
                self._load_signals,
                self._lease,
                self._load_ids,
                self._names,
                self._wait,
            )
        ]

    def make(self) -> Wrong:
        """The next one."""
        what, maker = self.chance.choice(self._makers)
        call, request, reasons = maker()
        data = request.SerializeToString()
        if self.chance.random() < 0.02:
            return self._undecodable(call, data)
        return Wrong(call, data, reasons, what)

    def _undecodable(self, call: str, data: bytes) -> Wrong:
        if self.chance.random() < 0.1:
            tail = b"\x82\x3f" + bytes([0xFF, 0xFF, 0x03]) + bytes(MESSAGE_BYTES_MAX)
        else:  # a field that says it goes on after the end
            tail = b"\x0a" + bytes([self.chance.randrange(1, 128)])
        return Wrong(call, data + tail, (Reason.MALFORMED,), "undecodable")

    # --- right requests, to be spoilt ---

    def _number(self, least: int, most: int) -> int:
        """Between these two, often one of them."""
        if most - least < 2 or self.chance.random() < 0.4:
            return self.chance.choice((least, most))
        return self.chance.randint(least, most) >> self.chance.randrange(64) | least

    def _hashes(self, most: int = BATCH) -> tuple[int, list[bytes]]:
        group = self.guest.some_group()
        return group, self.guest.some_hashes(group, most)

    def _lookup(self) -> tuple[str, Any]:
        group, hashes = self._hashes()
        mode = self.chance.choice((cache_pb2.LOOKUP_MODE_PREFIX, cache_pb2.LOOKUP_MODE_EXACT))
        request: Any = self.guest.lookup_request(group, hashes, mode, lease=self.chance.random() < 0.5)
        dice = self.chance.random()
        if dice < 0.2:
            touch = cache_pb2.TouchRequest(session=request.session, queries=request.queries)
            if self.chance.random() < 0.5:
                touch.hold_ms = self._number(0, U64)
            else:
                touch.cold = self.chance.random() < 0.5
            return "touch", touch
        if dice < 0.4:
            return "prefetch", cache_pb2.PrefetchRequest(session=request.session, queries=request.queries)
        return "lookup", request

    def _signals(self) -> cache_pb2.Signals:
        """Right; does not use the ticket up."""
        ticket = self._last_ticket + self.chance.choice((1, 1, 2, 1000))
        return cache_pb2.Signals(ticket=ticket, part_word=self.guest.free_word())

    @property
    def _last_ticket(self) -> int:
        return self.guest.front.machine.core.instances[self.guest.epoch].last_ticket  # type: ignore[index]

    @property
    def _full(self) -> bool:
        return len(self.guest.gated) >= LIMITS.transfers_max

    def _store(self) -> tuple[str, Any]:
        group, hashes = self._hashes()
        first = self.chance.randrange(BLOCKS - BATCH)
        request = cache_pb2.StoreRequest(
            session=self.guest.ref(),
            signals=self._signals(),
            group=group,
            hashes=b"".join(hashes),
            block_ids=range(first, first + len(hashes)),
        )
        if self.chance.random() < 0.3:
            hold_ms, ttl_ms = sorted(self._number(0, U64) for _ in range(2))
            request.retention.hold_ms, request.retention.ttl_ms = hold_ms, ttl_ms
            request.retention.host_only = self.chance.random() < 0.5
        return "store", request

    def _held(self) -> Held | None:
        return self.chance.choice(self.guest.leases) if self.guest.leases else None

    def _load(self, held: Held) -> tuple[str, Any]:
        request = cache_pb2.LoadRequest(
            session=self.guest.ref(),
            signals=self._signals(),
            group=held.group,
            lease_id=held.lease,
            block_ids=range(len(held.hashes)),
            keep_lease=self.chance.random() < 0.3,
        )
        return "load", request

    def _anything(self) -> tuple[str, Any]:
        ref = self.guest.ref()
        match self.chance.randrange(6):
            case 0:
                return self._lookup()
            case 1:
                return self._store()
            case 2:
                held = self._held()
                return self._load(held or Held(1, 0, [b""]))
            case 3:
                return "release", cache_pb2.ReleaseRequest(session=ref, lease_ids=[1])
            case 4:
                return "cancel", cache_pb2.CancelRequest(session=ref, tickets=[1])
            case _:
                return "wait", cache_pb2.WaitRequest(session=ref, tickets=[max(1, self._last_ticket)])

    # --- who asks ---

    def _no_session(self) -> tuple[str, Message, tuple[Reason, ...]]:
        call, request = self._anything()
        token = self.guest.scheduler.token
        strange = [b"", token[:-1], token + b"\0", self.chance.randbytes(16), self.chance.randbytes(3)]
        strange += [each for other in self.others for each in other.stale_tokens]
        request.session.token = self.chance.choice(strange)
        if self.chance.random() < 0.1:
            request.ClearField("session")
        return call, request, (Reason.UNKNOWN_TOKEN,)

    def _wrong_epoch(self) -> tuple[str, Message, tuple[Reason, ...]]:
        call, request = self._anything()
        own = self.guest.epoch
        others = [other.epoch for other in self.others] + self.guest.past_epochs
        epochs = [0, own + 1, U64, self._number(0, U64), *others]
        request.session.epoch = self.chance.choice([epoch for epoch in epochs if epoch != own])
        return call, request, (Reason.WRONG_EPOCH,)

    def _wrong_role(self) -> tuple[str, Message, tuple[Reason, ...]]:
        if not self.guest.kind.apart:
            return self._wrong_epoch()
        call, request = self._anything()
        if call == "wait":  # its answer is no secret inside the instance
            return self._wait()
        request.session.CopyFrom(self.guest.ref(self.chance.randrange(self.guest.kind.world)))
        return call, request, (Reason.ROLE,)

    # --- lookups ---

    def _queries(self) -> tuple[str, Message, tuple[Reason, ...]]:
        call, request = self._lookup()
        match self.chance.randrange(3):
            case 0:
                request.ClearField("queries")
            case 1:
                for _ in range(self.chance.choice((64, 65, 100))):
                    request.queries.append(request.queries[0])
            case _:  # a group twice; exact mode is for touches only then
                request.queries.append(request.queries[0])
                if call == "touch" or request.queries[0].mode == cache_pb2.LOOKUP_MODE_PREFIX:
                    return call, request, (Reason.UNKNOWN_GROUP,)
                return call, request, (Reason.MODE_UNSUPPORTED,)
        return call, request, (Reason.COUNT_MISMATCH,)

    def _query(self) -> tuple[str, Message, tuple[Reason, ...]]:
        call, request = self._lookup()
        query = request.queries[0]
        match self.chance.randrange(4):
            case 3:
                query.hash_stride = self._number(1, U32)
                return call, request, (Reason.MODE_UNSUPPORTED,)
            case 0:
                query.mode = self.chance.choice((0, 2, 4, 2**31 - 1, -1, -(2**31)))
                return call, request, (Reason.MODE_UNSUPPORTED,)
            case 1:
                query.window_blocks = self._number(1, U32)
                return call, request, (Reason.MODE_UNSUPPORTED,)
            case _:
                query.group = self._number(len(self.guest.kind.fragments), U32)
                return call, request, (Reason.UNKNOWN_GROUP,)

    # --- hashes ---

    def _with_hashes(self, data: bytes, ids: int) -> tuple[str, Any]:
        if self.chance.random() < 0.5:
            call, request = self._lookup()
            request.queries[0].hashes = data
        else:
            call, request = self._store()
            request.hashes = data
            request.ClearField("block_ids")
            request.block_ids.extend(range(min(ids, LIMITS.transfer_blocks_max)))
        return call, request

    def _ragged_hashes(self) -> tuple[str, Message, tuple[Reason, ...]]:
        size = self.guest.kind.hash_bytes
        _, hashes = self._hashes()
        data = b"".join(hashes)
        match self.chance.randrange(3):
            case 0:
                data = data[: -self.chance.randrange(1, size)]
            case 1:
                data += self.chance.randbytes(self.chance.randrange(1, size))
            case _:
                data = self.chance.randbytes(self.chance.randrange(1, size))
        return *self._with_hashes(data, len(hashes)), (Reason.HASH_LENGTH,)

    def _too_many_hashes(self) -> tuple[str, Message, tuple[Reason, ...]]:
        count = LIMITS.lookup_hashes_max + self.chance.choice((1, 1, 2, 100))
        data = bytes(count * self.guest.kind.hash_bytes)
        return *self._with_hashes(data, count), (Reason.TOO_MANY_BLOCKS,)

    # --- stores and loads ---

    def _store_ids(self) -> tuple[str, Message, tuple[Reason, ...]]:
        call, request = self._store()
        ids = request.block_ids
        match self.chance.randrange(5):
            case 0:
                ids.append(0)
                return call, request, (Reason.COUNT_MISMATCH,)
            case 1:
                ids.pop()
                return call, request, (Reason.COUNT_MISMATCH,)
            case 2:
                ids.extend([0] * LIMITS.transfer_blocks_max)
                return call, request, (Reason.TOO_MANY_BLOCKS,)
            case 3:
                request.group = self._number(len(self.guest.kind.fragments), U32)
                return call, request, (Reason.UNKNOWN_GROUP,)
            case _:
                ids[self.chance.randrange(len(ids))] = self._number(BLOCKS, U32)
                full = (Reason.QUEUE_FULL,) if self._full else ()
                return call, request, (Reason.BLOCK_ID_RANGE, *full)

    def _spoil_signals(self, request: Any) -> tuple[Reason, ...]:
        signals = request.signals
        match self.chance.randrange(8):
            case 0:
                request.ClearField("signals")
                return (Reason.TICKET_ORDER,)
            case 1:
                signals.ticket = self.chance.choice((0, U64, self._number(TICKET_MAX + 1, U64)))
                return (Reason.TICKET_ORDER,)
            case 2:
                signals.ticket = self._number(0, self._last_ticket)
                return (Reason.TICKET_ORDER,)
            case 3:
                signals.part_word = self._number(PARTS, U32)
                return (Reason.WORD_INDEX_RANGE,)
            case 4 if self.guest.gated:
                signals.part_word = self.chance.choice(list(self.guest.gated.values())).word
                return (Reason.WORD_INDEX_RANGE,)
            case 5:
                signals.gate = self.chance.choice((2, 99, -1, 2**31 - 1))
                return (Reason.MODE_UNSUPPORTED,)
            case 6 if self._full:
                return (Reason.QUEUE_FULL,)
            case _:
                signals.gate = types_pb2.GATE_DOORBELL
                signals.doorbell = self._number(DOORBELLS, U32)
                signals.doorbell_value = self._number(0, U64)
                return (Reason.WORD_INDEX_RANGE,)

    def _store_signals(self) -> tuple[str, Message, tuple[Reason, ...]]:
        call, request = self._store()
        return call, request, self._spoil_signals(request)

    def _retention(self) -> tuple[str, Message, tuple[Reason, ...]]:
        """To be held longer than they live, or held and cold."""
        if self.chance.random() < 0.5:
            call, request = self._lookup()
            if call == "touch":
                request.cold, request.hold_ms = True, self._number(1, U64)
                return call, request, (Reason.MALFORMED,)
        call, request = self._store()
        request.retention.ttl_ms = self._number(1, 2**63)
        request.retention.hold_ms = self._number(request.retention.ttl_ms + 1, U64)
        return call, request, (Reason.MALFORMED,)

    def _load_signals(self) -> tuple[str, Message, tuple[Reason, ...]]:
        held = self._held()
        if held is None:
            return self._lease()
        call, request = self._load(held)
        return call, request, self._spoil_signals(request)

    def _strange_leases(self) -> Iterator[int]:
        yield from (0, U64, self._number(1 << 40, U64))
        yield from self.guest.dead_leases
        yield from (held.lease for other in self.others for held in other.leases)

    def _lease(self) -> tuple[str, Message, tuple[Reason, ...]]:
        """One that it does not hold."""
        lease = self.chance.choice(list(self._strange_leases()))
        group, hashes = self._hashes()
        call, request = self._load(Held(lease, group, hashes))
        full = (Reason.QUEUE_FULL,) if self._full else ()
        return call, request, (Reason.UNKNOWN_LEASE, Reason.FOREIGN, *full)

    def _load_ids(self) -> tuple[str, Message, tuple[Reason, ...]]:
        held = self._held()
        if held is None:
            return self._lease()
        call, request = self._load(held)
        ids = request.block_ids
        full = (Reason.QUEUE_FULL,) if self._full else ()
        match self.chance.randrange(6):
            case 0:
                ids.append(len(ids))
                return call, request, (Reason.COUNT_MISMATCH, *full)
            case 1:
                request.first = self._number(1, U32)
                return call, request, (Reason.COUNT_MISMATCH, *full)
            case 2:
                ids.extend([*ids, *ids])
                return call, request, (Reason.BLOCK_ID_DUPLICATE, Reason.TOO_MANY_BLOCKS, *full)
            case 3:
                ids[self.chance.randrange(len(ids))] = self._number(BLOCKS, U32)
                return call, request, (Reason.BLOCK_ID_RANGE, *full)
            case 4:
                ids.extend(range(LIMITS.transfer_blocks_max))
                return call, request, (Reason.TOO_MANY_BLOCKS,)
            case _:
                request.group = held.group + 1
                return call, request, (Reason.UNKNOWN_GROUP, *full)

    # --- names of many things ---

    def _names(self) -> tuple[str, Message, tuple[Reason, ...]]:
        ref = self.guest.ref()
        if self.chance.random() < 0.5:
            names = [self._number(0, U64)] * (LIMITS.leases_max + self.chance.choice((1, 2, 500)))
            release = cache_pb2.ReleaseRequest(session=ref, lease_ids=names)
            return "release", release, (Reason.TOO_MANY_BLOCKS,)
        names = [self._number(0, U64)] * (QUEUE + self.chance.choice((1, 2, 500)))
        return "cancel", cache_pb2.CancelRequest(session=ref, tickets=names), (Reason.TOO_MANY_BLOCKS,)

    def _wait(self) -> tuple[str, Message, tuple[Reason, ...]]:
        request = cache_pb2.WaitRequest(session=self.guest.ref(), tickets=self.guest.gated)
        match self.chance.randrange(3):
            case 0:
                request.tickets.extend([self._last_ticket] * (WAIT_TICKETS_MAX + 1))
                return "wait", request, (Reason.TOO_MANY_BLOCKS,)
            case 1:
                request.timeout_ms = self._number(WAIT_TIMEOUT_MS_MAX + 1, U32)
                return "wait", request, (Reason.DEADLINE,)
            case _:
                request.tickets.append(self.chance.choice((0, self._last_ticket + 1, TICKET_MAX, U64)))
                request.timeout_ms = self._number(0, WAIT_TIMEOUT_MS_MAX)
                return "wait", request, (Reason.UNKNOWN_TRANSFER,)
