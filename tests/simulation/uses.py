"""What engines do while they live: look up, store, load, ring, release; and how they check answers."""

from __future__ import annotations

import numpy as np
from kvtierd.core.actions import (
    GroupHits,
    LookupReply,
    SubmitReply,
)
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.blocks.tenants import TierShares
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import LeaseId, Ticket
from kvtierd.core.maintenance.explain import BlockVerdict
from kvtierd.core.stimuli import (
    NO_RETENTION,
    BlockQuery,
    LookupBlocks,
    PrefetchBlocks,
    ReleaseLeases,
    RenewSession,
    RetentionRequest,
    Signals,
    SubmitLoad,
    SubmitStore,
    SubmittedChain,
    TouchBlocks,
)

from tests.simulation.engine import (
    BLOCKS,
    CHAIN_LENGTH,
    CHAINS,
    DOORBELLS,
    Engine,
    HeldLease,
    Pending,
    as_hashes,
)
from tests.simulation.world import (
    ACCEPTED,
    EXISTS,
    HIT,
    LIMITS,
    MISS,
    PENDING,
    STILL_PENDING,
    THROTTLED,
    UNWANTED,
    World,
    snapshot,
)


def _hashes(world: World, engine: Engine, longest: int) -> tuple[int, list[bytes]]:
    """A group, and a run of keys from one sequence, mostly from its start."""
    group = world.random.randrange(len(engine.kind.sizes))
    first = world.random.choice((0, 0, 0, world.random.randrange(CHAIN_LENGTH)))
    end = world.random.randint(first, min(CHAIN_LENGTH, first + longest))
    return group, engine.run(world.random.randrange(CHAINS), first, end)


def open_page(world: World, engine: Engine) -> None:
    """The scheduler asks for an index page, which is compared with the tables from then on."""
    assert engine.scheduler is not None
    refusal = world.open_page(engine.scheduler, world.random.randrange(len(engine.kind.sizes)))
    assert refusal is None or refusal.reason in (Reason.INSTANCE_INCOMPLETE, Reason.EPOCH_ENDED), refusal
    world.outcomes["index pages opened"] += refusal is None


def lookup(world: World, engine: Engine) -> None:
    group, keys = _hashes(world, engine, 9)
    exact = world.random.choice((False, False, True))
    lease = world.random.random() < 0.7
    host_only = world.random.random() < 0.05
    assert engine.scheduler is not None
    queries = (BlockQuery(group, as_hashes(keys), exact=exact),)
    again = world.random.random() < 0.2
    answer = world.do(LookupBlocks(engine.scheduler, engine.epoch, queries, lease, host_only, again))
    assert isinstance(answer, LookupReply)
    [reply] = answer.groups
    ready = engine.view is not None and engine.view.ready and not world.draining
    leased = reply.hits if lease else None
    readable = _check_states(
        world, engine, queries[0], keys, reply, ready=ready, host_only=host_only, leased=leased
    )
    hits = readable if leased is None else readable[:leased]
    assert (reply.hits, reply.readable if ready else 0) == (len(hits), len(readable))
    if reply.lease is not None:
        engine.leases.append(HeldLease(reply.lease, group, hits))
    elif lease:
        assert not hits, "what no lease holds is no hit"
    assert (answer.lease_refused is not None) == (len(hits) < len(readable))
    if answer.lease_refused is not None:
        assert answer.lease_refused.reason is Reason.LEASE_LIMIT
        world.outcomes["lease on " + ("fewer blocks than readable" if hits else "none of them")] += 1


def _check_states(
    world: World,
    engine: Engine,
    query: BlockQuery,
    keys: list[bytes],
    reply: GroupHits,
    *,
    ready: bool,
    host_only: bool = False,
    leased: int | None = None,
) -> list[bytes]:
    """What a lookup tells, against what the records say afterwards. `leased`: of the readable blocks only so
    many are told as hits. Returns the readable ones."""
    group = query.group
    told = (reply.states if query.exact else reply.up_to_first_miss(len(keys))).tolist()
    states = [world.expected(engine, group, key) if ready else MISS for key in keys]
    hits = [key for key, state in zip(keys, states, strict=True) if state == HIT]
    if not query.exact:
        run = next((i for i, state in enumerate(states) if state != HIT), len(states))
        states, hits = states[: run + 1], keys[:run]
    if leased is not None and leased < len(hits):
        if not query.exact:
            states = states[: leased + 1]
        beyond = [i for i, state in enumerate(states) if state == HIT][leased:]
        assert all(told[i] in (MISS, PENDING) for i in beyond), "what is not leased is no hit"
        for i in beyond:
            states[i] = told[i]
    assert len(told) == len(states)
    for key, state, said in zip(keys, states, told, strict=False):
        if state == PENDING and world.is_late(engine, group, key):
            world.outcomes["late promotion is a miss"] += 1
            assert said == MISS
        elif ready and state == MISS and world.is_on_disk(engine, group, key) and not host_only:
            assert said in (MISS, PENDING)
            world.outcomes["on a disk, " + ("pending" if said == PENDING else "no room")] += 1
        else:
            assert said == state
    return hits


def prefetch(world: World, engine: Engine) -> None:
    group, keys = _hashes(world, engine, 9)
    queries = (BlockQuery(group, as_hashes(keys), exact=world.random.choice((False, True))),)
    assert engine.scheduler is not None
    reply = world.do(PrefetchBlocks(engine.scheduler, engine.epoch, queries))
    assert isinstance(reply, LookupReply)
    ready = engine.view is not None and engine.view.ready and not world.draining
    _check_states(world, engine, queries[0], keys, reply.groups[0], ready=ready)


def _signals(world: World, engine: Engine, word: int) -> Signals:
    gated = world.random.random() < 0.4
    doorbell = world.random.randrange(DOORBELLS)
    value = max(bells[doorbell] for bells in engine.doorbells) + 1 if gated else 0
    return Signals(Ticket(next(engine.tickets)), word, gated, doorbell, value)


def _retention(world: World) -> RetentionRequest:
    if world.random.random() < 0.85:
        return NO_RETENTION
    hold_ms = world.random.choice((0, 0, 500, 5_000, 1 << 50))
    ttl_ms = world.random.choice((0, 0, 500, 10_000, 1 << 50))
    return RetentionRequest(hold_ms, ttl_ms, world.random.random() < 0.3)


def _chains(world: World, keys: list[bytes]) -> tuple[SubmittedChain, ...]:
    """How the blocks belong together: rightly, or as somebody says who means harm."""
    chains = []
    left = len(keys)
    while left and world.random.random() < 0.9:
        blocks = world.random.choice((left, 1, world.random.randint(1, left)))
        previous = world.random.choice((None, world.random.choice(keys)))
        chains.append(SubmittedChain(blocks, None if previous is None else as_hashes([previous])))
        left -= blocks
    return () if left else tuple(chains)


def store(world: World, engine: Engine) -> None:
    words = engine.free_part_words()
    group, keys = _hashes(world, engine, 8)
    if world.random.random() < 0.05 and keys:
        keys = (keys + keys[:1])[:8]
    loading = engine.blocks_in_use(group, loads_only=True)
    free = [block for block in range(BLOCKS) if block not in engine.blocks_in_use(group, loads_only=False)]
    if not words or len(free) < len(keys) or loading & set(free):
        return
    blocks = world.random.sample(free, len(keys))
    signals = _signals(world, engine, world.random.choice(words))
    before = [world.expected(engine, group, key) for key in keys]
    condemned = [(engine.digest, group, key) in world.condemned for key in keys]
    assert engine.scheduler is not None
    stimulus = SubmitStore(
        engine.scheduler,
        engine.epoch,
        signals,
        group,
        as_hashes(keys),
        np.array(blocks, np.uint32),
        _retention(world),
        _chains(world, keys),
    )
    # The daemon may post and the engine's memory must be right before anything can be copied.
    engine.fill(group, keys, blocks)
    reply = _submit(world, engine, stimulus)
    if reply is None:
        return
    results = reply.results.tolist()
    _check_results(world, engine, group, keys, before, condemned, results)
    for key, result in zip(keys, results, strict=True):
        kept = world.expected(engine, group, key)
        assert result != EXISTS or kept == HIT, "a store evicted a block of its own batch"
    accepted = [i for i, result in enumerate(results) if result == ACCEPTED]
    engine.pending[signals.ticket] = Pending(
        ticket=signals.ticket,
        store=True,
        group=group,
        hashes=[keys[i] for i in accepted],
        block_ids=[blocks[i] for i in accepted],
        part_word=signals.part_word,
        doorbell=signals.doorbell,
        doorbell_value=signals.doorbell_value if signals.gated else 0,
        keys=len(keys),
        results=results,
    )


def _check_results(
    world: World,
    engine: Engine,
    group: int,
    keys: list[bytes],
    before: list[int],
    condemned: list[bool],
    results: list[int],
) -> None:
    seen: dict[bytes, int] = {}
    throttled = False
    for key, state, doomed, result in zip(keys, before, condemned, results, strict=True):
        if doomed:
            assert result == THROTTLED, "a condemned block was stored over"
        elif key in seen:
            assert result == (STILL_PENDING if seen[key] == ACCEPTED else seen[key])
        elif state != MISS:
            assert result == {HIT: EXISTS, PENDING: STILL_PENDING}[state], f"{state} → {result}"
        elif world.machine.core.blocks.ranks:
            assert result in (ACCEPTED, THROTTLED, UNWANTED)
            throttled = throttled or result == THROTTLED
            world.outcomes["store unwanted"] += result == UNWANTED
        else:
            assert result == (THROTTLED if throttled else result)
            assert result in (ACCEPTED, THROTTLED)
            throttled = throttled or result == THROTTLED
        seen[key] = result
    if throttled:
        _check_throttled(world, engine, group)


def _check_throttled(world: World, engine: Engine, group: int) -> None:
    """Nothing that could have made room was left."""
    blocks = world.machine.core.blocks
    if blocks.ranks:  # what was there may have been worth more, and what was refused have left room
        world.outcomes["store throttled by rank"] += 1
        return
    domain = blocks.domains.of(tag_of(engine.kind.owner.tenant), engine.kind.shards(group))
    shares = TierShares(world.machine.core.tenants, blocks.domains, blocks.slots).now()
    short = [size for size, count in domain.per_size if blocks.slots.free(size) < count]
    full = blocks.live == blocks.capacity
    assert full or (short and blocks.slots.extents_free == 0), "throttled although there is room"
    for other in blocks.domains.by_id.values():
        if other is not domain and not shares.spare(other, domain):
            continue  # it has no more than its tenant's share
        if full or other is domain or set(other.sizes) & set(short):
            victims = blocks.table.victims(other.domain, 1)
            assert len(victims) == 0, "throttled although a block could have been evicted"
    world.outcomes["store throttled"] += 1


def load(world: World, engine: Engine) -> None:
    words = engine.free_part_words()
    if not words or not engine.leases:
        return
    held = world.random.choice(engine.leases)
    in_use = engine.blocks_in_use(held.group, loads_only=False)
    free = [block for block in range(BLOCKS) if block not in in_use]
    first = world.random.choice((0, world.random.randint(0, len(held.hashes))))
    count = min(len(free), world.random.randint(0, len(held.hashes) - first), LIMITS.transfer_blocks_max)
    blocks = world.random.sample(free, count)
    keep = world.random.random() < 0.3
    signals = _signals(world, engine, world.random.choice(words))
    assert engine.scheduler is not None
    stimulus = SubmitLoad(
        engine.scheduler,
        engine.epoch,
        signals,
        held.group,
        held.lease,
        first,
        np.array(blocks, np.uint32),
        keep,
    )
    engine.pending[signals.ticket] = Pending(
        ticket=signals.ticket,
        store=False,
        group=held.group,
        hashes=held.hashes[first : first + count],
        block_ids=blocks,
        part_word=signals.part_word,
        doorbell=signals.doorbell,
        doorbell_value=signals.doorbell_value if signals.gated else 0,
        keys=count,
        results=[],
    )
    reply = _submit(world, engine, stimulus, held)
    if reply is None:
        del engine.pending[signals.ticket]
    elif not keep:
        engine.leases.remove(held)


def _submit(
    world: World, engine: Engine, stimulus: SubmitStore | SubmitLoad, held: HeldLease | None = None
) -> SubmitReply | None:
    before = snapshot(world.machine)
    reply = world.try_(stimulus)
    if isinstance(reply, Refusal):
        assert snapshot(world.machine) == before, f"{reply} changed something"
        ready = engine.view is not None and engine.view.ready
        expected = {Reason.DRAINING: world.draining, Reason.INSTANCE_INCOMPLETE: not ready}
        expected[Reason.QUEUE_FULL] = len(engine.pending) >= LIMITS.transfers_max
        if held is not None:
            expected[Reason.LEASE_EXPIRED] = True
        assert expected.get(reply.reason), reply
        if reply.reason is Reason.LEASE_EXPIRED:
            assert held is not None
            engine.leases.remove(held)
        return None
    assert isinstance(reply, SubmitReply)
    return reply


def ring(world: World, engine: Engine) -> None:
    """A rank's stream passes a point: all that was submitted before it may be copied."""
    for rank in world.random.sample(range(engine.kind.world), world.random.randint(1, engine.kind.world)):
        for pending in engine.pending.values():
            bells = engine.doorbells[rank]
            bells[pending.doorbell] = max(bells[pending.doorbell], pending.doorbell_value)


def touch(world: World, engine: Engine) -> None:
    group, keys = _hashes(world, engine, 9)
    assert engine.scheduler is not None
    queries = (BlockQuery(group, as_hashes(keys), exact=world.random.choice((False, True))),)
    hold_ms, cold = world.random.choice(((0, False), (0, True), (2_000, False), (30_000, False)))
    stimulus = TouchBlocks(engine.scheduler, engine.epoch, queries, hold_ms, cold)
    assert world.do(stimulus) is None


def release(world: World, engine: Engine) -> None:
    if engine.leases and engine.scheduler is not None:
        held = engine.leases.pop(world.random.randrange(len(engine.leases)))
        world.do(ReleaseLeases(engine.scheduler, engine.epoch, (held.lease, LeaseId(1 << 40))))


def renew(world: World, engine: Engine) -> None:
    world.do(RenewSession(world.random.choice(list(engine.sessions.values()))))


def explain(world: World, engine: Engine) -> None:
    """Whatever a hash's state, the verdict is what the records say, and asking changes nothing."""
    group, keys = _hashes(world, engine, 1)
    if not keys or not engine.digest:
        return
    key = keys[0]
    before = snapshot(world.machine)
    answer = world.machine.explain(key, engine.digest.hex(), group).explanations
    assert snapshot(world.machine) == before
    [explanation] = answer
    world.outcomes[f"explained {explanation.verdict.value}"] += 1
    state = world.expected(engine, group, key)
    if (engine.digest, group, key) in world.condemned:
        assert explanation.verdict is BlockVerdict.CORRUPT
    elif state != MISS:
        assert explanation.verdict is {HIT: BlockVerdict.READABLE, PENDING: BlockVerdict.BEING_WRITTEN}[state]
    elif world.is_on_disk(engine, group, key):
        assert explanation.verdict is BlockVerdict.ON_DISK
    else:
        assert explanation.verdict not in (
            BlockVerdict.READABLE,
            BlockVerdict.BEING_WRITTEN,
            BlockVerdict.ON_DISK,
        )


def wait(world: World, engine: Engine) -> None:
    """What Wait asks: every ticket the engine has is answered, or was long ago."""
    assert engine.scheduler is not None
    for ticket in engine.pending:
        assert world.machine.transfer(engine.scheduler, engine.epoch, Ticket(ticket)) is None
