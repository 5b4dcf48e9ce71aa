"""Lookups of several groups, or of a window: the longest prefix that all of them can serve, worked out block
by block from the records."""

from __future__ import annotations

from kvtierd.core.actions import GroupHits, LookupReply
from kvtierd.core.stimuli import BlockQuery, LookupBlocks, PrefetchBlocks

from tests.simulation.engine import CHAIN_LENGTH, CHAINS, Engine, HeldLease, as_hashes
from tests.simulation.world import HIT, LIMITS, MISS, PENDING, World


def lookup_together(world: World, engine: Engine) -> None:
    """Or prefetch. All groups have blocks of one size here, so a prefix is as many blocks of each."""
    groups = len(engine.kind.sizes)
    end = world.random.randint(0, min(CHAIN_LENGTH, LIMITS.lookup_hashes_max // groups))
    keys = engine.run(world.random.randrange(CHAINS), 0, end)
    windows = [world.random.choice((0, 0, 1, 2, 3)) for _ in range(groups)]
    if groups == 1:
        windows = [world.random.randint(1, 3)]
    queries = tuple(BlockQuery(group, as_hashes(keys), window) for group, window in enumerate(windows))
    lease, host_only = world.random.random() < 0.7, world.random.random() < 0.05
    scheduler = engine.scheduler
    assert scheduler is not None
    if world.random.random() < 0.1:
        lease = host_only = False
        answer = world.do(PrefetchBlocks(scheduler, engine.epoch, queries))
    else:
        answer = world.do(LookupBlocks(scheduler, engine.epoch, queries, lease, host_only))
    assert isinstance(answer, LookupReply)
    ready = engine.view is not None and engine.view.ready and not world.draining
    states = [
        [world.expected(engine, group, key) if ready else MISS for key in keys] for group in range(groups)
    ]
    readable = max(
        length
        for length in range(len(keys) + 1)
        if all(
            set(states[group][_first(length, window) : length]) <= {HIT}
            for group, window in enumerate(windows)
        )
    )
    hits = answer.groups[0].hits
    assert hits <= readable
    assert (answer.lease_refused is not None) == (hits < readable)
    longer = len(answer.groups[0].states)
    for query, reply, own in zip(queries, answer.groups, states, strict=True):
        assert (reply.hits, len(reply.states)) == (hits, longer)
        assert reply.readable == (readable if ready else 0)
        assert (reply.lease is not None) == (lease and hits > 0)
        first = _first(hits, query.window_blocks)
        if reply.lease is not None:
            assert reply.lease_first == first
            engine.leases.append(HeldLease(reply.lease, query.group, keys[first:hits]))
        _check(world, engine, query, keys, reply, own, host_only=host_only, cut=hits < readable)
    if hits:
        world.outcomes["several groups hit" if groups > 1 else "a window hits"] += 1
    if longer > hits:
        world.outcomes["a joint prefix will be longer"] += 1


def _first(end: int, window: int) -> int:
    """The first block that a prefix of so many needs."""
    return max(0, end - window) if window else 0


def _check(
    world: World,
    engine: Engine,
    query: BlockQuery,
    keys: list[bytes],
    reply: GroupHits,
    states: list[int],
    *,
    host_only: bool,
    cut: bool,
) -> None:
    """What one group is told, block by block. `cut`: less is leased than is readable."""
    hits, told = reply.hits, reply.states.tolist()
    first_hit = _first(hits, query.window_blocks)
    first_needed = _first(len(told), query.window_blocks)
    for position, said in enumerate(told):
        key, state = keys[position], states[position]
        if first_hit <= position < hits:
            assert said == state == HIT
        elif position < max(hits, first_needed):
            assert said == MISS, "it is not needed"
        elif cut:
            assert (said, state) == (PENDING, HIT), "readable, and to be leased later"
        elif said == HIT:
            assert state == HIT
        else:
            assert said == PENDING, "what is not needed would make no longer prefix"
            if state == PENDING:
                assert not world.is_late(engine, query.group, key)
            else:
                assert state == MISS
                assert not host_only
                assert world.is_on_disk(engine, query.group, key), "nothing brings it"
