"""What both clients share: every call that does not wait. The shells add waiting, threads or tasks, and the
connection."""

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from kvtier import address
from kvtier.asking import Touch
from kvtier.attach import NotRegisteredError
from kvtier.errors import KvtierError, Reason
from kvtier.joint import GroupQuery
from kvtier.layout import Group, Namespace, Settings
from kvtier.lookups import (
    BlockIds,
    Hashes,
    Lease,
    Lookup,
    LookupMode,
    LookupRecord,
    join_hashes,
    list_block_ids,
)
from kvtier.memory import Memory, StreamDoorbells
from kvtier.retention import Retention, check_seconds
from kvtier.session import Doorbell, ProtocolState
from kvtier.shared import SharedBuffer
from kvtier.spec import AttachSpec, Role, check_prefill_rate
from kvtier.status import ClientState, ClientStatus
from kvtier.stream_words import WORD_BYTES
from kvtier.transfers import EventLike, Outcome, StoreResult, TransferRecord, TransferState
from kvtier.v1 import cache_pb2
from kvtier.words import DOORBELLS_DEFAULT, PARTS_DEFAULT, Direction, PartRef, PartState

log = logging.getLogger("kvtier")

AUDIT_ERROR_MAX, AUDIT_DETAIL_BYTES_MAX = 1e6, 512

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
    # Heartbeats notice a silent daemon within a second or so; this one gives up a connection that is beyond
    # hope.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
CLOSE_TIMEOUT_S = 5.0


class ClientBase(ABC):
    """One client: a session with the daemon that comes and goes in the background.

    No call here waits, and none raises because of the daemon: without it there are misses and refused
    transfers. KvtierError is raised for the caller's own mistakes only, before anything was changed.
    """

    def __init__(
        self,
        *,
        instance: str,
        namespace: Namespace,
        role: Role = Role.BOTH,
        rank: int = 0,
        world_size: int = 1,
        groups: Sequence[Group] = (),
        memory: Memory | None = None,
        socket: str | os.PathLike[str] | None = None,
        doorbells: int = DOORBELLS_DEFAULT,
        parts: int = PARTS_DEFAULT,
        program: str = "kvtier",
        prefill_tokens_per_s: float = 0.0,
        configuration: Settings = (),
        on_ready: Callable[[ClientStatus], None] | None = None,
    ) -> None:
        """Makes a client, which connects in the background. All arguments are keywords; `instance` and
        `namespace` are required, and a client that holds a rank needs `groups` and `memory` as well. Raises
        KvtierError, naming the field, if they make no sense, and TypeError for one that is not listed here.

        instance: str
            Name of the engine instance, 1 to 1,024 bytes of UTF-8: the same for all processes of the engine,
            and unique among the instances that are attached to the daemon.
        namespace: Namespace
            What makes blocks of two engines interchangeable: model, dtype, hash scheme and the like. Blocks
            are shared only between clients whose namespaces and groups are equal.
        role: Role, default Role.BOTH
            BOTH for an instance of one process. Else SCHEDULER for the one client that looks up, stores and
            loads, and RANK for each client that owns one rank's share of the KV cache.
        rank: int, default 0
            Number of this client's rank, from 0 to `world_size` - 1.
        world_size: int, default 1
            How many ranks the instance has, 1 to 1,024. The same in all of its clients; 1 with Role.BOTH.
        groups: Sequence[Group], default ()
            KV cache groups of this rank, each with the planes that its blocks are made of: in a plane, block
            b is the `fragment_bytes` bytes of `memory` from byte `base_offset + b * block_stride_bytes` on.
            At least one for a client that holds a rank, none for a scheduler.
        memory: Memory | None, default None
            This rank's KV cache, `size_bytes` bytes: a SharedBuffer on the host, a kvtier.cuda.DeviceMemory
            on a GPU, or an object with the same methods. It lives until the client is closed or has given it
            back (`release_memory`). None for a scheduler.
        socket: str | os.PathLike[str] | None, default None
            Path of the daemon's gRPC socket. None: KVTIER_SOCKET of the environment, or else where `kvtierd
            serve` listens without a configuration (`kvtier.default_socket()`).
        doorbells: int, default 64
            How many doorbell words this rank has, 0 to 65,536; `ring` and Doorbell name them from 0 on.
        parts: int, default 1024
            How many part words a rank has, 1 to 65,536, which is how many transfers of the instance can be
            under way at once. The same in all clients of the instance.
        program: str, default "kvtier"
            Name and version of the program, at most 1,024 bytes of UTF-8; `kvtierctl engines` shows it.
        prefill_tokens_per_s: float, default 0.0
            Tokens of a prompt that the engine computes in a second, 0.001 to 1e9. The daemon brings nothing
            up from a disk that would take longer than computing it. 0: not known, or told later by
            `report_prefill_rate`.
        configuration: tuple[tuple[str, str], ...], default ()
            For people: settings of the engine that are not in the namespace, as far as they are not the
            defaults: 0 to 256 names and values, sorted by name. Where an audit finds that two engines do not
            compute the same blocks, the daemon tells in which of these they differ.
        on_ready: Callable[[ClientStatus], None] | None, default None
            Called each time the client has become ready: once for every epoch, so again after the daemon was
            away. By the thread or the task that keeps the session alive: it must return at once. What it
            raises is logged. None: a line in the log says so where one has told before that the daemon was
            away.
        """
        self.address = address.resolve(socket)
        spec = AttachSpec(
            instance=instance,
            namespace=namespace,
            role=role,
            rank=rank,
            world_size=world_size,
            groups=tuple(groups),
            memory=memory,
            doorbells=doorbells,
            parts=parts,
            program=program,
            prefill_tokens_per_s=prefill_tokens_per_s,
            configuration=tuple(configuration),
        )
        self._lock = threading.Lock()
        self._session = ProtocolState(
            spec, clock=time.monotonic, make_event=self._make_event, release=self._release
        )
        make_doorbells = getattr(spec.memory, "stream_doorbells", None)
        self._doorbells: StreamDoorbells | None = None
        if make_doorbells is not None and spec.doorbells:
            self._doorbells = make_doorbells(self._ring_from_thread)
        self._landing_lock = threading.Lock()
        self._landing_made = False
        self._reported = ""
        self._on_ready = on_ready
        self._works = False
        """As the log has it: `_tell_ready` was the last to write, not `_tell_lost`."""
        self._warned = False
        self._start()

    @property
    def instance(self) -> str:
        """Name of the engine instance."""
        return self._session.spec.instance

    # --- observing ---

    @property
    def status(self) -> ClientStatus:
        """A snapshot: state, why it is not ready, counters."""
        mode = "" if self._doorbells is None else self._doorbells.mode
        with self._lock:
            return self._session.status(mode)

    @property
    def role(self) -> Role:
        """What this client is for."""
        return self._session.spec.role

    @property
    def namespace(self) -> Namespace:
        """Whose blocks these are."""
        return self._session.spec.namespace

    @property
    def ready(self) -> bool:
        """Whether lookups, stores and loads work now."""
        with self._lock:
            return self._session.state is ClientState.READY

    @property
    def epoch(self) -> int | None:
        """Epoch of the instance; None while there is no session."""
        with self._lock:
            return self._session.epoch

    @property
    def ready_epoch(self) -> int | None:
        """`epoch` while lookups, stores and loads work, else None: both at once, of one moment."""
        return self._session.ready_epoch  # without the lock, as an engine asks several times in every step

    @property
    def transfer_blocks_max(self) -> int:
        """Blocks that the daemon takes in one store or load; 0 while there is no session."""
        return self._session.transfer_blocks_max  # without the lock, likewise

    @property
    def prefix_tokens_max(self) -> int:
        """Tokens of the longest prefix that the daemon's pool can hold; 0: not known, or longer ones can be
        kept on disks. Of a longer one store no more: its end would push its beginning out."""
        return self._session.prefix_tokens_max  # without the lock, likewise

    # --- the submitter's side ---

    def _start_lookup(
        self, hashes: Hashes, group: int, mode: LookupMode, lease: bool, host_only: bool
    ) -> LookupRecord:
        joined = self._joined(hashes, group)
        with self._lock:
            record = self._session.lookup(group, joined, mode, lease=lease, host_only=host_only)
            self._wake_writer()
        return record

    def _start_prefetch(self, hashes: Hashes, group: int, mode: LookupMode) -> LookupRecord:
        joined = self._joined(hashes, group)
        with self._lock:
            record = self._session.prefetch(group, joined, mode)
            self._wake_writer()
        return record

    def _start_lookup_groups(
        self, hashes: Hashes, queries: Sequence[GroupQuery], lease: bool, host_only: bool
    ) -> LookupRecord:
        joined = self._joined_for(hashes, queries)
        with self._lock:
            record = self._session.lookup_groups(joined, queries, lease=lease, host_only=host_only)
            self._wake_writer()
        return record

    def _start_prefetch_groups(self, hashes: Hashes, queries: Sequence[GroupQuery]) -> LookupRecord:
        joined = self._joined_for(hashes, queries)
        with self._lock:
            record = self._session.prefetch_groups(joined, queries)
            self._wake_writer()
        return record

    def touch_groups(
        self, hashes: Hashes, queries: Sequence[GroupQuery], *, hold_s: float = 0.0, lazily: bool = False
    ) -> None:
        """As `touch`, of several groups: of those with a window, its last blocks."""
        check_seconds("hold_s", hold_s)
        self._touch(Touch(self._joined_for(hashes, queries), queries, hold_s=hold_s), lazily=lazily)

    def cool_groups(self, hashes: Hashes, queries: Sequence[GroupQuery]) -> None:
        """As `cool`, of several groups: of those with a window, its last blocks."""
        self._touch(Touch(self._joined_for(hashes, queries), queries, cold=True))

    def _joined_for(self, hashes: Hashes, queries: Sequence[GroupQuery]) -> bytes:
        spec = self._submitting()
        if not queries or len({query.group for query in queries}) != len(queries):
            message = "one query for each group, and one at least"
            raise KvtierError(Reason.UNKNOWN_GROUP, message, field="queries", value=len(queries))
        for query in queries:
            spec.block_ids_max(query.group)
        return join_hashes(hashes, spec.namespace.hash_bytes)

    def known_run(
        self,
        hashes: Sequence[bytes],
        first: int = 0,
        end: int | None = None,
        *,
        group: int = 0,
        counted: bool = True,
    ) -> int | None:
        """How many of `hashes[first:end]` the daemon knows in some tier, up to the first that it does not.
        Asks nobody: microseconds, from memory that the daemon keeps up to date. Advisory: 0 spares a lookup;
        more says how many blocks are worth one. None: it cannot be told now; look up. An answer of 0 goes
        into the daemon's hit rate as a lookup that was spared, unless it is not `counted`.

        Raises ValueError for a hash of another length than the namespace's.
        """
        self._submitting()
        with self._lock:
            end = len(hashes) if end is None else end
            return self._session.known_run(group, hashes, first, end, counted=counted)

    def report_prefill_rate(self, tokens_per_s: float) -> None:
        """Says how many tokens of a prompt the engine computes in a second, as measured lately: the daemon
        promotes nothing from a lower tier that takes longer. Never waits: the daemon hears the last of
        several reports with the next heartbeat, and again after a reconnection. 0 says nothing.

        Raises KvtierError for a rate that is no number, negative, or beyond belief.
        """
        self._submitting()
        check_prefill_rate(tokens_per_s)
        with self._lock:
            self._session.report_prefill(tokens_per_s)

    def report_audit(
        self,
        *,
        matched: bool,
        error: float,
        threshold: float,
        block_hash: bytes,
        group: int = 0,
        detail: str = "",
    ) -> None:
        """Says that a block was computed although it could have been loaded, and whether the two are the
        same but for rounding: the relative `error` between them, and the most that rounding explains. The
        daemon counts audits, and warns people of a mismatch. `detail`: where they differ most. Never waits:
        the daemon hears of it with one of the next heartbeats.

        Raises KvtierError for numbers that are none, negative or above 1,000,000, and for a hash of another
        length than the namespace's.
        """
        self._submitting()
        for name, value in (("error", error), ("threshold", threshold)):
            if not 0 <= value <= AUDIT_ERROR_MAX:
                message = f"a number between 0 and {AUDIT_ERROR_MAX:,.0f}"
                raise KvtierError(Reason.MALFORMED, message, field=name, value=value)
        if len(block_hash) != self.namespace.hash_bytes:
            message = f"hashes of this namespace have {self.namespace.hash_bytes} bytes"
            raise KvtierError(Reason.HASH_LENGTH, message, field="block_hash", value=len(block_hash))
        text = "".join(each if each.isprintable() else "?" for each in detail)
        with self._lock:
            self._session.report_audit(
                cache_pb2.Audit(
                    matched=matched,
                    error=error,
                    threshold=threshold,
                    group=group,
                    block_hash=block_hash,
                    detail=text.encode()[:AUDIT_DETAIL_BYTES_MAX].decode(errors="ignore"),
                )
            )

    def touch(self, hashes: Hashes, *, group: int = 0, hold_s: float = 0.0, lazily: bool = False) -> None:
        """Tells the daemon that these blocks, a prefix, are in use: they are evicted later, the first of them
        last. Never waits, and is forgotten if the daemon cannot be told now.

        For a prefix that the engine uses from its own cache, or that was stored in several parts. With
        `hold_s` they are not evicted at all for so many seconds, as far as a Retention's `hold_s` promises
        it. A daemon that cannot hold is told nothing: see `status.can_retain`, and `status.last_error`.
        `lazily`: it may be told later, with the next message, at the latest with the next heartbeat.

        Raises KvtierError for a time that is none.
        """
        check_seconds("hold_s", hold_s)
        self._touch(Touch(self._joined(hashes, group), group=group, hold_s=hold_s), lazily=lazily)

    def cool(self, hashes: Hashes, *, group: int = 0) -> None:
        """Tells the daemon that these blocks, in sequence order, are not worth keeping: they are the first to
        be evicted, the last of them first, unless they are used again. Blocks that are held, leased or not
        stored yet are left alone. Never waits, and is forgotten as a touch is. Of more hashes than the daemon
        takes at once, the last.
        """
        self._touch(Touch(self._joined(hashes, group), group=group, cold=True))

    def flush(self) -> None:
        """Sends what was submitted `lazily` and still waits for a message to go with. Never waits; costs next
        to nothing if there is none."""
        if self._session.has_unhurried:
            with self._lock:
                self._session.hurry()
                self._wake_writer()

    def _joined(self, hashes: Hashes, group: int) -> bytes:
        spec = self._submitting()
        spec.block_ids_max(group)
        return join_hashes(hashes, spec.namespace.hash_bytes)

    def _touch(self, touch: Touch, *, lazily: bool = False) -> None:
        with self._lock:
            self._session.touch(touch, lazily=lazily)
            self._wake_writer()

    def _submit_store(
        self,
        hashes: Hashes,
        block_ids: BlockIds,
        group: int,
        doorbell: Doorbell | None,
        retention: Retention | None,
        *,
        lazily: bool,
    ) -> TransferRecord:
        spec = self._submitting()
        joined = join_hashes(hashes, spec.namespace.hash_bytes)
        ids = list_block_ids(block_ids, spec.block_ids_max(group), distinct=False)
        count = len(joined) // spec.namespace.hash_bytes
        if len(ids) != count:
            message = f"one block id for each of the {count} hashes"
            raise KvtierError(Reason.COUNT_MISMATCH, message, field="block_ids", value=len(ids))
        self._check_doorbell(doorbell)
        with self._lock:
            record = self._session.store(group, joined, ids, doorbell, retention, lazily=lazily)
            self._wake_writer()
        return record

    def _submit_load(
        self,
        source: Lease | Lookup,
        block_ids: BlockIds,
        group: int,
        first: int,
        doorbell: Doorbell | None,
        keep_lease: bool,
    ) -> TransferRecord:
        spec = self._submitting()
        lease = source.lease if isinstance(source, Lookup) else source
        if lease is None:
            if isinstance(source, Lookup) and source.error is not None:
                raise source.error
            message = "the lookup holds no lease: ask with lease=True, and load only what hit"
            raise KvtierError(Reason.UNKNOWN_LEASE, message, field="source", value="no lease")
        ids = list_block_ids(block_ids, spec.block_ids_max(group), distinct=True)
        if first < 0 or first + len(ids) > lease.blocks:
            message = f"blocks {first} to {first + len(ids) - 1} of a lease of {lease.blocks}: load fewer"
            raise KvtierError(Reason.COUNT_MISMATCH, message, field="first", value=first)
        self._check_doorbell(doorbell)
        with self._lock:
            record = self._session.load(group, lease, first, ids, doorbell, keep_lease=keep_lease)
            self._wake_writer()
        return record

    # --- the rank's side ---

    def ring(self, doorbell: int, value: int) -> None:
        """Raises a doorbell word to `value`: gated parts up to it may start. A lower value changes nothing.

        The engine's memory that those parts read or write is ready when this is called. Costs about a
        microsecond.
        """
        with self._lock:
            self._session.words.ring(doorbell, value)

    def ring_on(self, stream: Any, doorbell: int, value: int) -> None:
        """As `ring`, once `stream` has done what it holds now: the engine's process has nothing to wait for.

        `stream`: of the GPU that the client's memory is on; a CUstream as a number, a torch.cuda.Stream, or
        an object with `__cuda_stream__`. A doorbell is rung by one stream, with values that rise. Not while
        the stream is being captured. Costs a few microseconds; the first call, before the client was ever
        registered, some milliseconds. What was queued still lands after `close`.

        The GPU itself writes the word; where it cannot, a thread rings after an event (`status` says so).
        Raises KvtierError if the client's memory is on no GPU, or if the driver refuses.
        """
        doorbells = self._doorbells
        if doorbells is None:
            if self.status.state is ClientState.CLOSED:
                return
            message = "the memory that this client was made with is on no GPU: use ring"
            raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="stream", value=stream)
        if not self._landing_made:
            self._make_landing(doorbells)
        with self._lock:
            if self._session.state is ClientState.CLOSED:
                return
            wanted, address = self._session.words.ask(doorbell, value)
        if wanted:  # without the lock: a full stream makes the driver wait
            doorbells.ring_on(stream, address, doorbell, value)

    def part_state(self, ref: PartRef) -> PartState:
        """What has become of this rank's part of a transfer. `state.over` is the fence.

        Once an epoch has ended for this client nothing of it can start, and what had not started is LOST.
        """
        with self._lock:
            return self._session.words.state(ref)

    def revoke(self, ref: PartRef) -> PartState:
        """Ends this rank's part for ever if it has not started, and a store's even then, without asking the
        daemon. Returns what it is now: over, or STARTED, which only its worker can end."""
        with self._lock:
            return self._session.words.revoke(ref)

    def register_memory(self, memory: Memory) -> None:
        """Gives the client memory again, of the same shape, after `release_memory` has returned True. It is
        registered in the background (`wait_ready`), also after the daemon was away.

        Raises KvtierError, and changes nothing, if the groups do not fit, or if there is memory already.
        """
        with self._lock:
            self._session.memory.give(memory)
            self._wake_session()

    # --- inside ---

    def _report(self, error: NotRegisteredError) -> None:
        """Tells people, once, that memory is not registered for a reason that will not go by itself."""
        why = str(error)
        if error.lasting and why != self._reported:
            self._reported = why
            log.warning("kvtier %s: %s; without it every lookup misses", self.address.socket, why)

    def _is_known(self, why: str) -> bool:
        """Whether the log says already that the daemon is away, and for this reason."""
        return not self._works and self._session.status().last_error == why

    def _tell_lost(self, why: str) -> None:
        self._works, self._warned = False, True
        log.warning("kvtier %s: %s; without it every lookup misses", self.address.socket, why)

    def _tell_ready(self) -> None:
        """Called without the lock."""
        status, warned = self.status, self._warned
        self._works, self._warned = True, False
        if self._on_ready is None:
            if warned:
                log.info("kvtier %s: attached to kvtierd %s", self.address.socket, status.daemon_version)
            return
        try:
            self._on_ready(status)
        except Exception:
            log.exception("kvtier: on_ready failed")

    def _make_landing(self, doorbells: StreamDoorbells) -> None:
        """Somewhere for streams to write as long as there is no page; what lands there is carried over."""
        size_bytes = self._session.spec.doorbells * WORD_BYTES
        with self._landing_lock:
            with self._lock:
                self._landing_made |= self._session.words.exposed
            if self._landing_made:
                return
            try:
                with SharedBuffer.create(size_bytes, "kvtier-landing") as buffer:
                    address = doorbells.expose(buffer, size_bytes)
                    with self._lock:
                        if not self._session.words.exposed:
                            self._session.words.expose(buffer, address)
            except OSError:
                pass  # no descriptor or no memory for it: events ring until there is a page
            self._landing_made = True

    def _ring_from_thread(self, doorbell: int, value: int) -> None:
        """Called by a thread of the stream doorbells."""
        with self._lock:
            self._session.words.ring(doorbell, value)

    def _memory_wanted_back(self) -> None:
        """Raises KvtierError for a scheduler. Called with the lock held."""
        self._session.memory.release()
        self._wake_session()

    def _submitting(self) -> AttachSpec:
        spec = self._session.spec
        if not spec.role.submits:
            message = "a rank does not look up or submit: the instance's scheduler does"
            raise KvtierError(Reason.ROLE, message, field="role", value=spec.role.name)
        return spec

    def _check_doorbell(self, doorbell: Doorbell | None) -> None:
        doorbells = self._session.spec.doorbells
        if doorbell is None:
            return
        if not 0 <= doorbell.index < doorbells:
            message = f"this client has {doorbells} doorbells"
            raise KvtierError(Reason.WORD_INDEX_RANGE, message, field="doorbell.index", value=doorbell.index)
        if not 0 <= doorbell.value < 2**64:
            raise KvtierError(
                Reason.MALFORMED, "must fit 64 bits", field="doorbell.value", value=doorbell.value
            )

    def _release(self, lease: Lease) -> None:
        with self._lock:
            self._session.release(lease)
            self._wake_writer()

    def _abandon(self, record: LookupRecord) -> Lookup:
        with self._lock:
            return self._session.abandon(record)

    def _outcome(self, record: TransferRecord) -> Outcome:
        if not self._session.spec.role.holds_rank:  # no part word has a say in it
            return record.outcome
        with self._lock:
            return self._session.outcome(record)

    def _cancel(self, record: TransferRecord) -> None:
        with self._lock:
            self._session.cancel(record)
            self._wake_writer()

    @abstractmethod
    def _start(self) -> None:
        """Starts the session in the background. Called once, by the constructor."""

    @staticmethod
    @abstractmethod
    def _make_event() -> EventLike:
        """What a caller of this client waits for."""

    @abstractmethod
    def _wake_writer(self) -> None:
        """There may be messages to send. Called with the lock held."""

    @abstractmethod
    def _wake_session(self) -> None:
        """There may be something to register or to give back. Called with the lock held."""


class LookupCallBase:
    """A lookup on its way."""

    def __init__(self, client: ClientBase, record: LookupRecord) -> None:
        self._client = client
        self._record = record

    def poll(self) -> Lookup | None:
        """The answer if it has come. Does not wait."""
        return self._record.answer

    def abandon(self) -> Lookup:
        """Nobody will ask again: returns the answer if it has come, else a miss. A lease that comes later is
        released; one that is in the answer returned here is the caller's, to load or to release.
        """
        return self._client._abandon(self._record)


class TransferBase:
    """A submitted store or load. Its properties are always up to date and never wait."""

    def __init__(self, client: ClientBase, record: TransferRecord) -> None:
        self._client = client
        self._record = record

    @property
    def direction(self) -> Direction:
        """store or load"""
        return self._record.direction

    @property
    def part(self) -> PartRef | None:
        """What the ranks must be told to follow their parts. None if it was refused at once, or there was
        nothing to do.

        If the daemon refuses it later (`outcome.refused`), its parts stay ARMED, because nobody has posted
        them: tell the ranks, or let them revoke what stays ARMED for too long.
        """
        return self._record.part

    @property
    def outcome(self) -> Outcome:
        """How it stands now."""
        return self._client._outcome(self._record)

    @property
    def ended(self) -> bool:
        """Whether there is no more to come from the daemon: done, failed, cancelled or refused."""
        return self.outcome.state is not TransferState.ACTIVE

    @property
    def fenced(self) -> bool:
        """Whether its blocks may be reused: nothing of it can still land, nothing still reads."""
        return self.outcome.fenced

    @property
    def results(self) -> tuple[StoreResult, ...] | None:
        """What an accepted store did with each key; None until it was accepted."""
        if not self._record.accepted:
            return None
        return tuple(StoreResult.of(value) for value in self._record.results)

    @property
    def transfer_id(self) -> tuple[int, int] | None:
        """(boot nonce, number) as the daemon's logs have it; None until it was accepted."""
        return self._record.number

    def cancel(self) -> None:
        """Asks the daemon to end it early. Its outcome still comes."""
        self._client._cancel(self._record)

    def revoke(self) -> bool:
        """Ends this client's own part for ever if it has not started; the daemon is not asked. True if the
        blocks may be reused now, False if the part is being copied. Without a rank of its own: False unless
        it is fenced."""
        part = self._record.part
        if part is None or not self._client._session.spec.role.holds_rank:
            return self.fenced
        return self._client.revoke(part).over

    def __repr__(self) -> str:
        ticket = self._record.part.ticket if self._record.part else None
        return f"<{type(self).__name__} {self.direction} ticket={ticket} {self.outcome}>"
