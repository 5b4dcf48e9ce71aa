"""Audits: for some requests that hit, the last block that could be loaded is computed as well, and compared
with what is stored.

Nothing else notices the right bytes of the wrong model: every check of bytes passes, and the output is wrong.
The stored block is loaded into a block of the engine that nobody uses, the request computes its own, and a
worker compares the two where they lie. A block that the same weights computed in another batch differs by
rounding; one of other weights, positions or scales has little to do with it.

An audit costs its request at most one unit of computing, and other requests nothing.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier import Client, Doorbell, GroupKind, KvtierError, Lookup, LookupCall, PartRef, Transfer

from kvtier_vllm import meta
from kvtier_vllm.groups import Groups
from kvtier_vllm.hooks import block_table
from kvtier_vllm.scheduler.holding import WholeBlockPool
from kvtier_vllm.scheduler.tables import hashes_of
from kvtier_vllm.scheduler.tracking import TrackedRequest

UNITS_MIN = 2
"""The fewest units of a hit that is audited, so that at least one is loaded."""
OPEN_MAX = 4
"""The most audits at the same time."""
PATIENCE_S = 30.0
"""An audit that has not come to a verdict after this time is given up."""
FREE_FRACTION_MIN = 0.05
"""The share of the engine's blocks that must be free before some are taken for an audit."""

# The relative error above which two blocks are not of one model, by the dtypes of KV cache and model; the
# coarser one counts. For the derivation see docs/design/identity.md, "Audits".
_THRESHOLDS = {
    "float32": 0.01,
    "float16": 0.05,
    "bfloat16": 0.2,
    "fp8": 0.3,
}


def threshold_of(*dtypes: str) -> float:
    """Returns the threshold for blocks of these dtypes, as vLLM names them: "bfloat16", "torch.float16",
    "fp8_e4m3" and so on. "auto" is ignored."""
    names = {"fp8" if "fp8" in name else name.removeprefix("torch.") for name in dtypes}
    return max(_THRESHOLDS.get(name, _THRESHOLDS["fp8"]) for name in names - {"auto"})


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """What an audit has found."""

    matched: bool
    error: float
    """The worst `comparing.Difference.error` of all groups and ranks."""
    threshold: float
    group: int
    block_hash: bytes
    detail: str
    """The layer that differs most."""


@dataclass(slots=True)
class AuditCounters:
    """Totals since the engine started."""

    audits: int = 0
    """Audits that came to a verdict."""
    mismatches: int = 0
    worst_error: float = 0.0
    """The largest error of those that matched."""
    worst_mismatch: float = 0.0
    """The largest error of the others."""


@dataclass(slots=True, eq=False)
class _Place:
    """The block of one group that is compared."""

    group: int
    index: int
    """The number of the block in the request."""
    block_hash: bytes
    call: LookupCall | None = None
    answer: Lookup | None = None
    spare: Any = None
    """vLLM's block that the stored bytes are loaded to."""
    transfer: Transfer | None = None
    computed: Any = None
    """vLLM's block that the request has computed, which is held."""


@dataclass(slots=True, eq=False)
class _Audit:
    request: str
    end_tokens: int
    places: list[_Place]
    until_s: float
    asked: bool = False
    submitted: bool = False
    ordered: bool = False
    cancelled: bool = False
    results: list[meta.AuditResult] = field(default_factory=list)


class Audits:
    """The audits of one engine. Called from the scheduler's thread; nothing here waits except `settle`."""

    def __init__(
        self,
        groups: Groups,
        rate: float,
        threshold: float,
        world_size: int,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        *,
        direct: bool = True,
    ) -> None:
        """rate: the share of requests with hits that are audited; 0: none.
        world_size: the number of workers that compare.
        draw: returns random numbers from 0 to 1.
        direct: whether only the daemon copies to the engine's blocks.
        """
        self._direct = direct
        self._groups = groups
        self._shapes = [shape for shape in groups.shapes if shape.kind is not GroupKind.MAMBA]
        self._rate = rate if self._shapes else 0.0
        self._threshold = threshold
        self._world_size = world_size
        self._log = log
        self._clock = clock
        self._draw = draw
        self._pool: WholeBlockPool | None = None
        self._due = True
        self._chosen: set[str] = set()
        """Chosen requests that have not begun."""
        self._tickets = itertools.count(1)
        self._open: dict[int, _Audit] = {}
        self._dropped: list[int] = []
        """Tickets of cancelled audits that the workers were not told of yet."""
        self.counters = AuditCounters()

    def __len__(self) -> int:
        """Returns the number of audits that hold blocks of the engine, or are about to."""
        return len(self._open)

    @property
    def has_orders(self) -> bool:
        """Whether `plan` has something to do."""
        return bool(self._open or self._dropped)

    def watch(self, pool: WholeBlockPool) -> None:
        """Takes the engine's block pool. Nothing is audited before."""
        self._pool = pool

    def attached(self) -> None:
        """Notes that the engine has attached to a daemon: the next hit that can be audited is."""
        self._due = True

    def choose(self, request: str, units: int) -> bool:
        """Returns whether a request that could load so many units computes the last of them. Asked once for
        each."""
        if self._pool is None or self._rate <= 0 or units < UNITS_MIN:
            return False
        under_way = len(self._open) + len(self._chosen)
        if under_way >= OPEN_MAX or not ((self._due and not under_way) or self._draw() < self._rate):
            return False
        self._chosen.add(request)
        return True

    def begin(self, request: str, hashes: Sequence[bytes], unit: int) -> None:
        """Begins the audit of a chosen request, which has room for its blocks and computes this unit.
        `hashes` are all of the request's."""
        self._chosen.discard(request)
        end_tokens = (unit + 1) * self._groups.unit_tokens
        places = []
        for shape in self._shapes:
            index = end_tokens // shape.block_tokens - 1
            places.append(_Place(shape.group, index, hashes_of(shape, hashes)[index]))
        audit = _Audit(request, end_tokens, places, self._clock() + PATIENCE_S)
        self._open[next(self._tickets)] = audit

    def over(self, request: str) -> None:
        """Cancels the request's audit unless its block is computed, because it computes no more or loses its
        blocks. Safe to call twice."""
        self._chosen.discard(request)
        for ticket, audit in list(self._open.items()):
            if audit.request == request and not self._is_computed(audit):
                self._cancel(ticket, audit)

    def drop_all(self) -> None:
        """Cancels all audits, because there is another daemon or namespace."""
        self._chosen.clear()
        for ticket, audit in list(self._open.items()):
            self._cancel(ticket, audit)

    def plan(
        self,
        client: Client | None,
        output: Any,
        requests: Mapping[str, TrackedRequest],
        step: int,
        out: meta.Orders,
    ) -> None:
        """Moves audits on, and adds to `out` what the workers have to do. Called once per step, when vLLM has
        scheduled it. `requests` are all that vLLM has not finished."""
        for ticket, audit in list(self._open.items()):
            if audit.cancelled:
                continue
            if client is None or self._clock() > audit.until_s:
                self._cancel(ticket, audit)
                continue
            if not audit.submitted and not self._submit(client, ticket, audit, step, out):
                self._cancel(ticket, audit)
                continue
            if not self._is_computed(audit):
                tracked = requests.get(audit.request)
                scheduled = output.num_scheduled_tokens.get(audit.request)
                if tracked is None or scheduled is None:
                    continue
                if tracked.request.num_computed_tokens + scheduled < audit.end_tokens:
                    continue
                table = block_table(output, audit.request)
                if table is not None and not self._hold(audit, table):
                    self._cancel(ticket, audit)
                    continue
            if audit.submitted and not audit.ordered and self._is_computed(audit):
                audit.ordered = True
                out.compares.append(
                    meta.AuditCompare(
                        ticket,
                        tuple((one.group, one.spare.block_id, one.computed.block_id) for one in audit.places),
                    )
                )
        out.audits_dropped += self._dropped
        self._dropped = []

    def results(self, client: Client | None, results: Sequence[meta.AuditResult]) -> AuditVerdict | None:
        """Takes what workers have found. Returns a verdict that is a mismatch, or None."""
        bad = None
        for result in results:
            audit = self._open.get(result.ticket)
            if audit is None:
                continue
            audit.results.append(result)
            if len(audit.results) == self._world_size:
                self._forget(result.ticket, audit)
                verdict = None if audit.cancelled else self._judge(audit)
                if verdict is not None:
                    self._tell(client, verdict)
                    bad = bad if verdict.matched else verdict
        return bad

    def settle(self, timeout_s: float) -> None:
        """Cancels all audits, and waits at most `timeout_s` seconds until their copies have ended, to give
        their blocks back. For an engine that has nothing else to do."""
        self.drop_all()
        if not self._direct:
            return
        deadline_s = self._clock() + timeout_s
        for ticket, audit in list(self._open.items()):
            transfers = [one.transfer for one in audit.places if one.transfer is not None]
            while not all(one.outcome.fenced for one in transfers) and self._clock() < deadline_s:
                time.sleep(0.001)
            if all(one.outcome.fenced for one in transfers):
                self._forget(ticket, audit)

    # --- inside

    def _is_computed(self, audit: _Audit) -> bool:
        return audit.places[0].computed is not None

    def _submit(self, client: Client, ticket: int, audit: _Audit, step: int, out: meta.Orders) -> bool:
        """Has the stored blocks loaded, once they are leased. Returns False if they cannot be."""
        pool = self._pool
        assert pool is not None
        if not audit.asked:
            audit.asked = True
            for place in audit.places:
                place.call = client.start_lookup(
                    [place.block_hash], group=place.group, lease=True, host_only=True
                )
        for place in audit.places:
            if place.call is not None and (answer := place.call.poll()) is not None:
                place.call, place.answer = None, answer
        if any(place.call is not None for place in audit.places):
            return True
        if any(place.answer is None or place.answer.lease is None for place in audit.places):
            return False
        wanted = len(audit.places)
        if pool.get_num_free_blocks() - wanted < FREE_FRACTION_MIN * len(pool.blocks):
            return False
        audit.submitted = True
        parts: list[PartRef | None] = []
        for place, spare in zip(audit.places, pool.get_new_blocks(wanted), strict=True):
            place.spare = spare
            place.transfer = self._load(client, place, step)
            parts.append(None if place.transfer is None else place.transfer.part)
        spares = tuple(place.spare.block_id for place in audit.places)
        out.audits.append(meta.AuditLoad(ticket, tuple(parts), spares))
        return True

    def _load(self, client: Client, place: _Place, step: int) -> Transfer | None:
        assert place.answer is not None
        try:
            return client.load(
                place.answer,
                [place.spare.block_id],
                group=place.group,
                doorbell=Doorbell(meta.LOAD_DOORBELL, step),
            )
        except KvtierError as error:
            self._log.debug("kvtier: the load of an audit was refused: %s", error)
            return None

    def _hold(self, audit: _Audit, table: Sequence[Sequence[int]]) -> bool:
        """Holds the request's blocks as they are after this step. False: the request has lost one."""
        pool = self._pool
        assert pool is not None
        ids = [
            table[place.group][place.index] if place.index < len(table[place.group]) else 0
            for place in audit.places
        ]
        if 0 in ids:
            return False
        blocks = [pool.blocks[block] for block in ids]
        pool.touch(blocks)
        for place, block in zip(audit.places, blocks, strict=True):
            place.computed = block
        return True

    def _cancel(self, ticket: int, audit: _Audit) -> None:
        """Cancels an audit. Blocks that a load may still write to are kept until the workers report."""
        if audit.cancelled:
            return
        audit.cancelled = True
        self._release(audit)
        self._free(audit, computed=True)
        if audit.submitted:
            self._dropped.append(ticket)
        else:
            del self._open[ticket]

    def _forget(self, ticket: int, audit: _Audit) -> None:
        """Ends an audit, to whose blocks no copy can write any more."""
        del self._open[ticket]
        self._release(audit)
        self._free(audit, computed=True, spares=True)

    def _release(self, audit: _Audit) -> None:
        """Releases its leases."""
        for place in audit.places:
            if place.call is not None:
                place.answer, place.call = place.call.abandon(), None
            if place.answer is not None:
                place.answer.release()
                place.answer = None

    def _free(self, audit: _Audit, *, computed: bool = False, spares: bool = False) -> None:
        assert self._pool is not None
        for place in audit.places:
            if computed and place.computed is not None:
                self._pool.free_blocks([place.computed])
                place.computed = None
            if spares and place.spare is not None:
                self._pool.free_blocks([place.spare])
                place.spare = None

    def _judge(self, audit: _Audit) -> AuditVerdict | None:
        """Returns the verdict, or None if some worker could not compare."""
        found = [difference for result in audit.results for difference in result.differences]
        if any(not result.differences for result in audit.results):
            return None
        group, error, detail = max(found, key=lambda one: one[1])
        hashes = {place.group: place.block_hash for place in audit.places}
        matched = error <= self._threshold
        return AuditVerdict(matched, error, self._threshold, group, hashes[group], detail)

    def _tell(self, client: Client | None, verdict: AuditVerdict) -> None:
        self._due = False
        self.counters.audits += 1
        self.counters.mismatches += not verdict.matched
        if verdict.matched:
            self.counters.worst_error = max(self.counters.worst_error, verdict.error)
        else:
            self.counters.worst_mismatch = max(self.counters.worst_mismatch, verdict.error)
        if client is not None:
            client.report_audit(**asdict(verdict))
