"""Loads what was promised to vLLM: in one transfer for each group, or in several.

There are several if the daemon takes fewer blocks in one transfer, or if a prefix is larger than what it
leases at once. In that case the leased part is loaded, and when that has ended the rest is looked up, leased
and loaded in the same way, until all of it is there. Meanwhile the request waits in vLLM, as for any load.
What has left the pool meanwhile, or cannot be leased for too long, is reported as failed, and vLLM computes
it.

Only requests of one group of full attention are loaded in parts: with several groups, vLLM takes nothing of a
load of which a part has failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier import Client, Doorbell, KvtierError, Lease, Lookup, LookupCall, PartRef, Transfer

from kvtier_vllm.groups import Groups
from kvtier_vllm.meta import LOAD_DOORBELL, LoadOrder
from kvtier_vllm.scheduler.matching import ANSWER_DEADLINE_S, PENDING_POLL_S, PENDING_WAIT_S, Grant
from kvtier_vllm.scheduler.tables import Target


@dataclass(slots=True, eq=False)
class Rest:
    """Blocks of a load that are not leased yet."""

    hashes: Sequence[bytes]
    block_ids: tuple[int, ...]
    """The block that each hash is loaded to."""
    host_only: bool
    since_s: float
    """When it was first looked up, or last grew shorter."""
    asked_s: float = 0.0
    call: LookupCall | None = None

    def drop(self) -> None:
        """Abandons its lookup, because nobody waits for it any more."""
        if self.call is not None:
            self.call.abandon().release()
            self.call = None


@dataclass(slots=True, eq=False)
class PromisedLoad:
    """A load that was promised to vLLM."""

    transfers: list[Transfer | None]
    """The transfers that were submitted; None stands for one that was refused."""
    block_ids: frozenset[int]
    loaded: tuple[tuple[Target, Sequence[bytes]], ...]
    """For each group, where it is loaded to, and its hashes."""
    tokens: int
    submitted_s: float
    failed: bool = False
    rest: Rest | None = None

    @property
    def parts(self) -> list[PartRef]:
        return [one.part for one in self.transfers if one is not None and one.part is not None]

    @property
    def over(self) -> bool:
        """Whether all submitted transfers have ended, as far as the daemon knows."""
        return all(one is None or one.ended for one in self.transfers)

    @property
    def spoiled(self) -> bool:
        """Whether one of them was refused or has failed, as far as the daemon knows."""
        return any(one is None or (one.ended and not one.outcome.done) for one in self.transfers)


@dataclass(slots=True)
class _Orders:
    """The transfers of one step, as the workers are to follow them."""

    parts: list[PartRef | None] = field(default_factory=list)
    block_ids: list[tuple[int, ...]] = field(default_factory=list)
    transfers: list[Transfer | None] = field(default_factory=list)

    def add(self, transfer: Transfer | None, block_ids: tuple[int, ...]) -> None:
        self.transfers.append(transfer)
        self.parts.append(None if transfer is None else transfer.part)
        self.block_ids.append(block_ids)

    def order(
        self, request: str, rest: Rest | None, *, blocks_tell: bool = True, goes_on: bool = False
    ) -> LoadOrder:
        to_come = () if rest is None else rest.block_ids
        return LoadOrder(request, tuple(self.parts), tuple(self.block_ids), blocks_tell, goes_on, to_come)


class Loader:
    """Submits loads, and continues those that come in parts. Never waits."""

    def __init__(
        self,
        groups: Groups,
        log: logging.Logger,
        pending_wait_s: float = PENDING_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pending_wait_s` is how many seconds a part waits for its lease."""
        self._groups = groups
        self._log = log
        self._pending_wait_s = pending_wait_s
        self._clock = clock

    def begin(
        self,
        client: Client | None,
        request: str,
        grant: Grant | None,
        targets: Sequence[Target],
        hashes: Sequence[bytes],
        tokens: int,
        step: int,
        *,
        host_only: bool,
    ) -> tuple[PromisedLoad, LoadOrder]:
        """Submits what the grant has leased, to be released in this step. `hashes` are the request's. What
        cannot be submitted is reported as failed by the workers."""
        now_s = self._clock()
        orders, rest = _Orders(), None
        for target in targets:
            lease, start = self._lease_of(grant, target)
            # Targets begin where leases begin, or behind that.
            leased = 0 if lease is None else start + lease.blocks - target.first
            ids = target.block_ids
            if grant is not None and grant.lookup.unleased and 0 < leased < len(ids):
                behind = target.hashes_of(hashes)[leased:]
                rest = Rest(behind, ids[leased:], host_only, now_s)
                ids = ids[:leased]
            self._submit(client, orders, lease, ids, target.group, target.first - start, step)
        if grant is not None:
            grant.lookup.release()  # releases what no load has taken
        loaded = tuple((target, target.hashes_of(hashes)) for target in targets)
        all_ids = frozenset().union(*(target.block_ids for target in targets))
        load = PromisedLoad(orders.transfers, all_ids, loaded, tokens, now_s, rest=rest)
        return load, orders.order(request, rest, blocks_tell=len(self._groups.shapes) == 1)

    def go_on(self, client: Client | None, request: str, load: PromisedLoad, step: int) -> LoadOrder | None:
        """Returns the next part of a load, if it can begin in this step, or a last order that says that the
        rest fails, if it will not come. Returns None if there is no rest, or it has to wait."""
        rest = load.rest
        if rest is None:
            return None
        if client is None or load.failed or load.spoiled:
            return self.give_up(request, load)
        if not load.over:
            rest.since_s = self._clock()
            return None
        answer = self._ask(client, rest)
        if answer is None:
            return None
        if not answer.answered or answer.lease is None:
            answer.release()
            waited_s = self._clock() - rest.since_s
            if answer.answered and answer.pending and waited_s < self._pending_wait_s:
                return None  # asked again in a moment
            return self.give_up(request, load)
        ids, count = rest.block_ids, answer.lease.blocks
        load.rest = None
        if count < len(ids):
            load.rest = Rest(rest.hashes[count:], ids[count:], rest.host_only, self._clock())
        orders = _Orders()
        self._submit(client, orders, answer.lease, ids[:count], 0, 0, step)
        answer.release()
        load.transfers += orders.transfers
        return orders.order(request, load.rest, goes_on=True)

    def give_up(self, request: str, load: PromisedLoad) -> LoadOrder | None:
        """Gives up the rest of a load that is not submitted. Returns the order that says so, if there is a
        rest."""
        rest, load.rest = load.rest, None
        if rest is None:
            return None
        rest.drop()
        load.failed = True
        return LoadOrder(request, (None,), (rest.block_ids,), goes_on=True)

    def _lease_of(self, grant: Grant | None, target: Target) -> tuple[Lease | None, int]:
        """Returns the lease of a group, and the request's block with which it begins."""
        if grant is None:
            return None, target.first
        start = grant.first * self._groups.unit_tokens // target.block_tokens
        lease = grant.lookup.groups[target.group].lease
        return lease, start if lease is None else start + lease.first

    def _submit(
        self,
        client: Client | None,
        orders: _Orders,
        lease: Lease | None,
        block_ids: tuple[int, ...],
        group: int,
        first: int,
        step: int,
    ) -> None:
        """Submits blocks of a lease from `first` on, in as many transfers as it takes. The last consumes the
        lease."""
        most = len(block_ids) if client is None else client.transfer_blocks_max or len(block_ids)
        for begin in range(0, len(block_ids), most):
            ids = block_ids[begin : begin + most]
            transfer: Transfer | None = None
            if client is not None and lease is not None:
                try:
                    transfer = client.load(
                        lease,
                        ids,
                        group=group,
                        first=first + begin,
                        doorbell=Doorbell(LOAD_DOORBELL, step),
                        keep_lease=begin + most < len(block_ids),
                    )
                except KvtierError as error:
                    self._log.warning("kvtier: a load was refused: %s", error)
            orders.add(transfer, ids)

    def _ask(self, client: Client, rest: Rest) -> Lookup | None:
        """Returns the answer about the rest, or None while it is on its way, or it is too early to
        ask again."""
        now_s = self._clock()
        if rest.call is None:
            if now_s - rest.asked_s < PENDING_POLL_S:
                return None
            rest.asked_s = now_s
            rest.call = client.start_lookup(
                rest.hashes, self._groups.queries, lease=True, host_only=rest.host_only
            )
        answer = rest.call.poll()
        if answer is None:
            if now_s - rest.asked_s <= ANSWER_DEADLINE_S:
                return None
            answer = rest.call.abandon()
        rest.call = None
        return answer
