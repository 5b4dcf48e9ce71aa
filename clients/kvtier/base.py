"""What the blocking and the asyncio client share: every call that does not wait, and as generators of pauses
the waits that each of them performs in its own way."""

import atexit
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvtier.calls import EVENT_POLL_S, WORD_POLL_S, LookupCallBase, TransferBase, Waiting, wait_blocking
from kvtier.connection import address
from kvtier.connection.reports import ConnectionReports
from kvtier.connection.threads import ConnectionThreads
from kvtier.errors import KvtierError, Reason
from kvtier.layout import Group, Namespace, Settings
from kvtier.lookups import Lease, Lookup
from kvtier.memory import Memory, SharedBuffer, StreamDoorbells
from kvtier.queries import (
    BlockIds,
    Chain,
    GroupQuery,
    Hashes,
    LookupMode,
    Touch,
    check_queries,
    join_hashes,
    list_block_ids,
    one_query,
)
from kvtier.retention import Retention, check_seconds
from kvtier.session.state import ProtocolState
from kvtier.spec import AttachSpec, Role, check_prefill_rate
from kvtier.status import ClientState, ClientStatus
from kvtier.stream_words import WORD_BYTES
from kvtier.v1 import cache_pb2
from kvtier.words import DOORBELLS_DEFAULT, PARTS_DEFAULT, Doorbell, PartRef, PartState

AUDIT_ERROR_MAX, AUDIT_DETAIL_BYTES_MAX = 1e6, 512
LOOKUP_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 1.0
"""How long the interpreter's end waits for a session that nobody has closed."""

CallT = TypeVar("CallT", bound=LookupCallBase)
TransferT = TypeVar("TransferT", bound=TransferBase)
LookupT = TypeVar("LookupT")
"""A Lookup, or what comes to one when it is awaited."""
BoolT = TypeVar("BoolT")
"""Likewise a bool."""


class ClientBase(ABC, Generic[CallT, TransferT, LookupT, BoolT]):
    """One client: a session with the daemon, which is made in the background, and again when it was lost.

    No call raises because of the daemon: without one, lookups miss and transfers are refused. KvtierError is
    raised only for the caller's own mistakes, before anything was changed.
    """

    _call_type: type[CallT]
    _transfer_type: type[TransferT]
    _event_type: type[threading.Event] = threading.Event
    """The kind of event that callers of this client wait for."""

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
        secret: bytes = b"",
        on_ready: Callable[[ClientStatus], None] | None = None,
    ) -> None:
        """Makes a client, which connects in the background. All arguments are keywords; `instance` and
        `namespace` are required, and a client that holds a rank needs `groups` and `memory` as well. Raises
        KvtierError, naming the field, if they make no sense, and TypeError for one that is not listed here.

        instance: str
            Name of the engine instance, 1 to 1,024 bytes of UTF-8: the same for all processes of the engine,
            and unique among the instances of this user that are attached to the daemon.
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
            Settings of the engine that are neither in the namespace nor the default, for people: 0 to 256
            names and values, sorted by name. If an audit finds that two engines do not compute the same
            blocks, the daemon tells in which of these they differ.
        secret: bytes, default b""
            0 to 1,024 bytes that only the processes of this instance know, the same in all of them.
            Another process of the same user cannot join the instance, or take a place in it after a restart
            of the daemon, without them. b"": every process of the user can.
        on_ready: Callable[[ClientStatus], None] | None, default None
            Called each time the client has become ready: once for every epoch, so again after the daemon was
            away. It is called by a thread of the client's, or in the loop of an asyncio client, and must
            return at once; an exception is logged. None: if the log said before that the daemon was away,
            it then says that the client is attached.
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
            secret=secret,
        )
        self._session = ProtocolState(
            spec, clock=time.monotonic, make_event=self._event_type, release=self._release
        )
        make_doorbells = getattr(spec.memory, "stream_doorbells", None)
        doorbells_of_streams: StreamDoorbells | None = None
        if make_doorbells is not None and spec.doorbells:
            doorbells_of_streams = make_doorbells(self.ring)
        self._landing_lock = threading.Lock()
        self._landing_made = False
        self._begin()
        self._threads = ConnectionThreads(
            self._session,
            self.address,
            ConnectionReports(self.address.socket, on_ready, self._hand_over),
            doorbells_of_streams,
            changed=self._event_type(),
            ended=self._event_type(),
        )
        atexit.register(self._close_at_exit)

    @property
    def instance(self) -> str:
        """The name of the engine instance."""
        return self._session.spec.instance

    # --- observing ---

    @property
    def status(self) -> ClientStatus:
        """A snapshot of the client's state, why it is not ready, and its counters."""
        return self._threads.status()

    @property
    def role(self) -> Role:
        """Whether this client is the instance's scheduler, one of its ranks, or both."""
        return self._session.spec.role

    @property
    def namespace(self) -> Namespace:
        """The namespace of the blocks that this client stores and finds."""
        return self._session.spec.namespace

    @property
    def ready(self) -> bool:
        """Whether lookups, stores and loads work now."""
        with self._threads.lock:
            return self._session.state is ClientState.READY

    @property
    def memory_error(self) -> KvtierError | None:
        """Why the daemon has not got this client's memory, as the last attempt to register it has shown; None
        if it has it, or was not asked yet. With Reason.IMPORT_REFUSED it can get it as a
        kvtier.cuda.MirrorMemory."""
        return self._session.memory.error  # without the lock: engines ask in every step

    @property
    def epoch(self) -> int | None:
        """The epoch of the instance, or None while there is no session."""
        with self._threads.lock:
            return self._session.epoch

    @property
    def ready_epoch(self) -> int | None:
        """The epoch if lookups, stores and loads work now, else None. Spares asking for `ready` and `epoch`,
        between which the session might change."""
        return self._session.ready_epoch  # without the lock: engines ask several times in every step

    @property
    def transfer_blocks_max(self) -> int:
        """The number of blocks that the daemon takes in one store or load; 0 while there is no session."""
        return self._session.transfer_blocks_max

    @property
    def prefix_tokens_max(self) -> int:
        """How many tokens of a prefix fit the daemon's pool; 0 if that is not known, or if longer prefixes
        can be kept on disks. Store no more of a longer prefix: its end would push its beginning out."""
        return self._session.prefix_tokens_max

    # --- the submitter's side ---

    def wait_ready(self, timeout_s: float) -> BoolT:
        """Waits until lookups, stores and loads work, at most `timeout_s` seconds. Returns whether they do;
        if not, `status.why` says why."""
        return self._wait(self._ready(timeout_s))

    def lookup(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None = None,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        lease: bool = False,
        host_only: bool = False,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> LookupT:
        """Which blocks can be loaded now.

        hashes: n block hashes in sequence order: a list of n bytes objects of `namespace.hash_bytes` each,
            one bytes object of n * hash_bytes, or a uint8 array of shape (n, hash_bytes).
        queries: of several groups, one for each: the answer is the longest prefix that all of them can load
            now, with a lease for each group of what the prefix needs, for all groups or for none. The hashes
            are those of the group with the smallest blocks. None: of `group` alone.
        group: number of the KV cache group, from 0.
        mode: PREFIX asks for the leading run of blocks that can all be loaded, EXACT for each by itself.
        lease: blocks that hit stay until they are loaded or the answer is released: use it in a `with`, which
            is a plain one for an asyncio client too, because releasing never waits.
        host_only: what only a disk has is a miss, and stays there.
        timeout_s: seconds to wait for the answer. None in time is a miss, and so is every lookup after it
            until the daemon speaks again.

        Returns a Lookup: `hits` blocks, and in `states` a byte, MISS, PENDING or HIT, for each hash (in
        PREFIX mode up to the first that is no hit); for each of several groups in `groups`. Raises
        KvtierError for hashes of another length, and for a group that this client does not have."""
        return self._answer(
            lambda: self.start_lookup(
                hashes, queries, group=group, mode=mode, lease=lease, host_only=host_only
            ),
            timeout_s,
        )

    def start_lookup(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None = None,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        lease: bool = False,
        host_only: bool = False,
        again: bool = False,
    ) -> CallT:
        """Sends a lookup, as `lookup` does, and returns at once. Many may be on their way at once.

        again: the same request of the engine asked about these blocks before, so the daemon does not take
            this for another use of them.

        Wait for every call or abandon it, because its answer may hold a lease.
        """
        joined, asked = self._asked(hashes, queries, group, mode)
        with self._threads.lock:
            record = self._session.lookup(joined, asked, lease=lease, host_only=host_only, again=again)
            self._threads.wake_writer()
        return self._call_type(self._threads, record)

    def prefetch(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None = None,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> LookupT:
        """Has blocks that only a lower tier holds promoted to host memory, as far as there is room, ahead of
        a lookup.

        In PREFIX mode these are the leading run of blocks that are in some tier; in EXACT mode all blocks
        that are in one; with queries of several groups the blocks that make the prefix longer that all groups
        can load.

        Waits for the daemon's answer, but not for the promotion. The answer says what a lookup would say now,
        but grants no lease. Blocks on their way are PENDING.
        """
        return self._answer(lambda: self.start_prefetch(hashes, queries, group=group, mode=mode), timeout_s)

    def start_prefetch(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None = None,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
    ) -> CallT:
        """Sends a prefetch, as `prefetch` does, and returns at once. Nobody needs to wait for the answer,
        which holds no lease."""
        joined, asked = self._asked(hashes, queries, group, mode)
        with self._threads.lock:
            record = self._session.prefetch(joined, asked)
            self._threads.wake_writer()
        return self._call_type(self._threads, record)

    def known_run(
        self,
        hashes: Sequence[bytes],
        first: int = 0,
        end: int | None = None,
        *,
        group: int = 0,
        counted: bool = True,
    ) -> int | None:
        """Returns how many of `hashes[first:end]` the daemon has in some tier, up to the first that it does
        not have, or None if that cannot be told now.

        Takes microseconds and sends no message: it reads memory that the daemon keeps up to date. The answer
        is a hint: after 0 no lookup is needed, after more, or None, look up. An answer of 0 is counted in the
        daemon's hit rate as a lookup that was spared, unless `counted` is False.

        Raises ValueError for a hash of another length than the namespace's.
        """
        self._submitting()
        with self._threads.lock:
            end = len(hashes) if end is None else end
            return self._session.known_run(group, hashes, first, end, counted=counted)

    def knows_any(self, hashes: Sequence[bytes], *, group: int = 0) -> bool | None:
        """Returns whether the daemon has at least one of `hashes` in some tier, or None if that cannot be
        told now. With the first hashes of many prompts, this tells whether any of them is worth a lookup.

        Takes microseconds, sends no message and counts as no lookup. The answer is a hint, as that of
        `known_run` is. Raises ValueError for a hash of another length than the namespace's.
        """
        self._submitting()
        with self._threads.lock:
            return self._session.knows_any(group, hashes)

    def report_prefill_rate(self, tokens_per_s: float) -> None:
        """Tells the daemon how many tokens of a prompt the engine computes in a second, as measured lately.
        The daemon promotes nothing from a lower tier that would take longer than computing it.

        Never waits: the daemon hears the last rate that was reported with the next heartbeat, and again after
        each reconnection. 0 is ignored. Raises KvtierError unless the rate is 0 or from 0.001 to 1e9.
        """
        self._submitting()
        check_prefill_rate(tokens_per_s)
        with self._threads.lock:
            self._session.news.prefill(tokens_per_s)

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
        """Reports an audit: a block was computed and compared with the one that could have been loaded.

        matched: whether they are the same but for rounding.
        error: the relative error between them, from 0 to 1,000,000.
        threshold: the largest error that rounding explains, from 0 to 1,000,000.
        block_hash: the block's hash.
        group: number of the KV cache group, from 0.
        detail: where the two differ most, for people; at most 512 bytes are kept.

        The daemon counts audits, and warns of a mismatch. Never waits: it is sent with one of the next
        heartbeats. Raises KvtierError for an error or threshold out of range, and for a hash of another
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
        with self._threads.lock:
            self._session.news.audits.append(
                cache_pb2.Audit(
                    matched=matched,
                    error=error,
                    threshold=threshold,
                    group=group,
                    block_hash=block_hash,
                    detail=text.encode()[:AUDIT_DETAIL_BYTES_MAX].decode(errors="ignore"),
                )
            )

    def touch(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None = None,
        *,
        group: int = 0,
        hold_s: float = 0.0,
        lazily: bool = False,
    ) -> None:
        """Tells the daemon that the blocks of a prefix are in use: they are evicted later, the first of them
        last. Use it for a prefix that the engine has in its own cache, or that was stored in several parts.

        hashes, queries, group: as for `lookup`; of a group with a window its last blocks are meant.
        hold_s: also holds the blocks for so many seconds from now, as far as `Retention.hold_s` promises it.
        lazily: the message may be sent with the next one, at the latest with the next heartbeat.

        Never waits, and has no effect if the daemon cannot be told now. Raises KvtierError if `hold_s` is not
        a number from 0 to 1e9.
        """
        check_seconds("hold_s", hold_s)
        joined, asked = self._asked(hashes, queries, group)
        self._touch(Touch(joined, asked, hold_s=hold_s), lazily=lazily)

    def cool(self, hashes: Hashes, queries: Sequence[GroupQuery] | None = None, *, group: int = 0) -> None:
        """Tells the daemon that these blocks, in sequence order, are not worth keeping: they are evicted
        first, the last of them first, unless they are used again. Blocks that are held, leased or not stored
        yet stay as they are.

        `hashes`, `queries` and `group` are as for `touch`. Of more hashes than the daemon takes at once, the
        last are sent. Never waits, and has no effect if the daemon cannot be told now.
        """
        joined, asked = self._asked(hashes, queries, group)
        self._touch(Touch(joined, asked, cold=True))

    def flush(self) -> None:
        """Sends the messages that were submitted `lazily` and wait for another one. Never waits; costs next
        to nothing if there are none."""
        self._threads.flush()

    def _asked(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None,
        group: int,
        mode: LookupMode = LookupMode.PREFIX,
    ) -> tuple[bytes, Sequence[GroupQuery]]:
        """Returns the hashes as one bytes object, and the queries, once both are checked."""
        spec = self._submitting()
        if queries is None:
            spec.block_ids_max(group)
            queries = one_query(group, mode)
        else:
            check_queries(queries)
            for query in queries:
                spec.block_ids_max(query.group)
        return join_hashes(hashes, spec.namespace.hash_bytes), queries

    def _touch(self, touch: Touch, *, lazily: bool = False) -> None:
        with self._threads.lock:
            self._session.touch(touch, lazily=lazily)
            self._threads.wake_writer()

    def store(
        self,
        hashes: Hashes,
        block_ids: BlockIds,
        *,
        group: int = 0,
        doorbell: Doorbell | None = None,
        retention: Retention | None = None,
        lazily: bool = False,
        chains: Sequence[Chain] = (),
    ) -> TransferT:
        """Submits a store, for all ranks of the instance, and returns at once.

        hashes: n block hashes in sequence order, a parent before its children: a list of n bytes objects of
            `namespace.hash_bytes` each, one bytes object of n * hash_bytes, or a uint8 array of shape
            (n, hash_bytes).
        block_ids: n integers from 0 to `num_blocks` - 1 of the group, a list or an integer array of shape
            (n,): `block_ids[i]` is the engine's block of `hashes[i]`, on every rank.
        group: number of the KV cache group, from 0.
        doorbell: no rank starts before this doorbell of its own has reached the value; None: at once.
        retention: how long and where the blocks are kept; None: as long as there is room, in all tiers.
        lazily: nobody waits for its end. It is sent with the next message, after `flush`, or at the latest
            with the next heartbeat, and its end may be told up to 10 ms later, together with that of others.
            Spares both sides messages.
        chains: how the blocks belong together, if the store has those of several prompts or begins within
            one: all n blocks, one chain after the other. A daemon that learns what to keep evicts no block
            before those that follow it. Without it, it learns that from lookups alone.

        The blocks must not change until the transfer is fenced. Raises KvtierError for hashes of another
        length, for other counts, and for ids that do not exist; what the daemon refuses is told by the
        outcome.
        """
        spec = self._submitting()
        joined = join_hashes(hashes, spec.namespace.hash_bytes)
        ids = list_block_ids(block_ids, spec.block_ids_max(group), distinct=False)
        count = len(joined) // spec.namespace.hash_bytes
        if len(ids) != count:
            message = f"one block id for each of the {count} hashes"
            raise KvtierError(Reason.COUNT_MISMATCH, message, field="block_ids", value=len(ids))
        if chains and sum(chain.blocks for chain in chains) != count:
            told = ", ".join(str(chain.blocks) for chain in chains)
            message = f"together, the chains have the {count} blocks of the store"
            raise KvtierError(Reason.COUNT_MISMATCH, message, field="chains", value=told)
        self._check_doorbell(doorbell)
        with self._threads.lock:
            record = self._session.store(
                group, joined, ids, doorbell, retention, lazily=lazily, chains=chains
            )
            self._threads.wake_writer()
        return self._transfer_type(self._threads, record)

    def load(
        self,
        source: Lookup | Lease,
        block_ids: BlockIds,
        *,
        group: int = 0,
        first: int = 0,
        doorbell: Doorbell | None = None,
        keep_lease: bool = False,
    ) -> TransferT:
        """Submits a load, for all ranks of the instance, and returns at once.

        source: the answer to a lookup with `lease=True`, or its lease of this group.
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
        spec = self._submitting()
        lease = source.lease_of(group) if isinstance(source, Lookup) else source
        if lease is None:
            if isinstance(source, Lookup) and source.error is not None:
                raise source.error
            message = f"no lease of group {group}: look up with lease=True, and load only what hit"
            raise KvtierError(Reason.UNKNOWN_LEASE, message, field="source", value="no lease")
        ids = list_block_ids(block_ids, spec.block_ids_max(group), distinct=True)
        if first < 0 or first + len(ids) > lease.blocks:
            message = f"blocks {first} to {first + len(ids) - 1} of a lease of {lease.blocks}: load fewer"
            raise KvtierError(Reason.COUNT_MISMATCH, message, field="first", value=first)
        self._check_doorbell(doorbell)
        with self._threads.lock:
            record = self._session.load(group, lease, first, ids, doorbell, keep_lease=keep_lease)
            self._threads.wake_writer()
        return self._transfer_type(self._threads, record)

    # --- the rank's side ---

    def ring(self, doorbell: int, value: int) -> None:
        """Raises a doorbell word to `value`: parts that wait for at most this value may start. A lower value
        than before changes nothing.

        Call it when the engine's memory is ready to be read or written by those parts. It takes about a
        microsecond.
        """
        with self._threads.lock:
            self._session.words.ring(doorbell, value)

    def ring_on(self, stream: Any, doorbell: int, value: int) -> None:
        """Raises a doorbell word to `value`, as `ring` does, once `stream` has done the work that is queued
        on it now. Nothing in the engine's process has to wait for that.

        stream: a stream of the GPU that the client's memory is on: a CUstream as a number, a
            torch.cuda.Stream, or an object with `__cuda_stream__`. It must not be capturing. Only one stream
            rings a doorbell, with rising values.
        doorbell: number of the doorbell, from 0.
        value: what to raise it to.

        The GPU itself writes the word; where it cannot, a thread rings after an event (`status` says so).
        Takes a few microseconds; the first call, if the client was never registered before, some
        milliseconds. What was queued still lands after `close`. Raises KvtierError if the client's memory is
        on no GPU, or if the driver refuses.
        """
        doorbells = self._threads.doorbells
        if doorbells is None:
            if self.status.state is ClientState.CLOSED:
                return
            message = "the memory that this client was made with is on no GPU: use ring"
            raise KvtierError(Reason.DEVICE_MEMORY_INVALID, message, field="stream", value=stream)
        if not self._landing_made:
            self._make_landing(doorbells)
        with self._threads.lock:
            if self._session.state is ClientState.CLOSED:
                return
            wanted, address = self._session.words.ask(doorbell, value)
        if wanted:  # without the lock: a full stream makes the driver wait
            doorbells.ring_on(stream, address, doorbell, value)

    def part_state(self, ref: PartRef) -> PartState:
        """Returns the state of this rank's part of a transfer. `state.over` is the fence.

        Once an epoch has ended for this client, none of its parts can start; those that had not are LOST.
        """
        with self._threads.lock:
            return self._session.words.state(ref)

    def revoke(self, ref: PartRef) -> PartState:
        """Ends this rank's part for good without asking the daemon: a load's part if it has not started, a
        store's even then. Returns its state afterwards, which is over, or STARTED: then only its copy worker
        can end it."""
        with self._threads.lock:
            return self._session.words.revoke(ref)

    def release_memory(self, timeout_s: float) -> BoolT:
        """Takes this rank's memory back, for an engine that sleeps or moves its cache. From the call on every
        lookup of the instance misses, and no transfer starts.

        Returns True once no copy touches the memory any more and the daemon has unmapped it: then it may be
        freed. (If the session ended by itself, the daemon unmaps a moment later.) Returns False if that did
        not happen within `timeout_s` seconds; it goes on in the background, so call again. `register_memory`
        brings memory in again.
        """
        return self._wait(self._released(timeout_s))

    def register_memory(self, memory: Memory) -> None:
        """Gives the client memory of the same shape again, after `release_memory` has returned True. It is
        registered in the background (see `wait_ready`), and again each time that the daemon was away.

        Raises KvtierError, and changes nothing, if the groups do not fit, or if there is memory already.
        """
        with self._threads.lock:
            self._session.memory.give(memory)
            self._threads.wake_session()

    # --- the end ---

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> BoolT:
        """Ends the session, and waits at most `timeout_s` seconds for it. Safe to call twice, from any
        thread.

        Parts that have not started never will. Returns True if no copy touches this client's memory any more.
        Returns False if a copy was still running, or the threads had not ended: call it again before you
        reuse the memory.
        """
        return self._wait(self._closed(timeout_s))

    # --- inside ---

    def _make_landing(self, doorbells: StreamDoorbells) -> None:
        """Makes a buffer that streams write to as long as no words page is registered. What lands there is
        carried over to the page."""
        size_bytes = self._session.spec.doorbells * WORD_BYTES
        with self._landing_lock:
            with self._threads.lock:
                self._landing_made |= self._session.words.streams.writable
            if self._landing_made:
                return
            try:
                with SharedBuffer.create(size_bytes, "kvtier-landing") as buffer:
                    address = doorbells.expose(buffer, size_bytes)
                    with self._threads.lock:
                        if not self._session.words.streams.writable:
                            self._session.words.expose(buffer, address)
            except OSError:
                pass  # without a descriptor or memory for it, events ring until there is a page
            self._landing_made = True

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
        with self._threads.lock:
            self._session.release(lease)
            self._threads.wake_writer()

    # --- how to wait ---

    @abstractmethod
    def _wait(self, waiting: Waiting[bool]) -> BoolT:
        """Waits as this client does, and returns what was waited for."""

    @abstractmethod
    def _answer(self, start: Callable[[], CallT], timeout_s: float) -> LookupT:
        """Starts a lookup, and waits for its answer."""

    def _ready(self, timeout_s: float) -> Waiting[bool]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._threads.changed.clear()
            if self.ready:
                return True
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or self._threads.closing.is_set():
                return False
            yield self._threads.changed, min(remaining_s, EVENT_POLL_S)

    def _released(self, timeout_s: float) -> Waiting[bool]:
        deadline_s = time.monotonic() + timeout_s
        with self._threads.lock:
            self._session.memory.release()
            self._threads.wake_session()
        while True:
            with self._threads.lock:
                if self._session.memory.released:
                    return True
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return False
            yield None, min(remaining_s, WORD_POLL_S)

    def _closed(self, timeout_s: float) -> Waiting[bool]:
        deadline_s = time.monotonic() + timeout_s
        atexit.unregister(self._close_at_exit)
        threads = self._threads
        threads.end()
        while True:
            with threads.lock:
                self._session.words.reap()
                fenced = self._session.words.started() == 0
            ended = threads.ended.is_set()
            remaining_s = deadline_s - time.monotonic()
            if (fenced and (ended or threads.thread is threading.current_thread())) or remaining_s <= 0:
                break
            yield None if ended else threads.ended, min(remaining_s, EVENT_POLL_S if fenced else WORD_POLL_S)
        if ended:
            threads.thread.join(max(0.0, remaining_s))
        if threads.doorbells is not None:
            threads.doorbells.close()
        return fenced and ended

    def _close_at_exit(self) -> None:
        """Ends a session that nobody has closed, because the interpreter ends."""
        wait_blocking(self._closed(EXIT_TIMEOUT_S))

    def _begin(self) -> None:
        """Called by the constructor when all arguments are checked, before the threads start."""

    def _hand_over(self, call: Callable[[], None]) -> None:
        """Makes a call to the owner's code where this client is used. Called by the session's thread."""
        call()
