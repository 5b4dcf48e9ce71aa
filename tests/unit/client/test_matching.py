"""Requests that wait for blocks on their way: they are asked about at moderate intervals, for a limited time,
and never with two leases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier import HIT, MISS, PENDING, Client, GroupQuery, Lookup, Role
from kvtier.lookups import LookupRecord
from kvtier.session.state import ProtocolState
from kvtier.v1 import cache_pb2
from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.scheduler.matching import (
    ANSWER_DEADLINE_S,
    IDLE_BUDGETS,
    LEASE_AGE_MAX_S,
    PENDING_POLL_S,
    PENDING_WAIT_S,
    POLLS_MAX,
    STARTS_MAX,
    STUCK_S,
    Matcher,
)
from kvtier_vllm.scheduler.question import Question

from tests.unit.client.peer import Peer, hashes

BLOCKS = 12
STEP_S = 0.001
"""Of an engine that has nothing else to do."""


class Call:
    """As kvtier.LookupCall, on a clock that moves while somebody waits, if the daemon is slow."""

    def __init__(
        self,
        session: ProtocolState,
        record: LookupRecord,
        serve: Callable[[float], None],
        given_up: Callable[[], None],
    ) -> None:
        self._session, self._record, self._serve, self._given_up = session, record, serve, given_up

    def poll(self) -> Lookup | None:
        return self._record.answer

    @property
    def took_s(self) -> float | None:
        return self._record.took_s

    def wait_for_answer(self, timeout_s: float) -> Lookup | None:
        self._serve(timeout_s)
        return self._record.answer

    def abandon(self) -> Lookup:
        if self._record.answer is None:
            self._given_up()
        return self._session.abandon(self._record)


class Page:
    """The client's index page, with these hashes."""

    def __init__(self, there: set[bytes]) -> None:
        self._there = there

    def known_run(
        self, wanted: Sequence[bytes], first: int, end: int, *, group: int, counted: bool
    ) -> int | None:
        return next((at for at in range(end - first) if wanted[first + at] not in self._there), end - first)

    def knows_any(self, wanted: Sequence[bytes], *, group: int) -> bool | None:
        return not self._there.isdisjoint(wanted)


class World:
    """A matcher, the session of its client, and a daemon that says what the test wants. Blocks not named in
    `states` are HIT."""

    def __init__(self, peer: Peer, pending_wait_s: float = PENDING_WAIT_S) -> None:
        self.peer = peer
        self.matcher = Matcher(
            Question(Groups.one(16)), 0.0005, clock=lambda: peer.now_s, pending_wait_s=pending_wait_s
        )
        self.states: dict[bytes, int] = {}
        self.prompts: dict[str, list[bytes]] = {}
        self.leases: dict[int, str] = {}
        """What the daemon holds, and for which request."""
        self.asked_s: dict[str, list[float]] = {}
        self.deaf = False
        self.slow_s = self.waited_s = 0.0
        """How long an answer takes, and for how long answers were waited for."""
        self._due_s = 0.0
        """When the last lookup is answered."""
        self.spared = 0
        """Lookups that the index page has spared."""
        self.pages_read = 0
        """How often the index page was asked about the heads of prompts."""
        self.index: set[bytes] | None = None
        """What the index page has; None: there is none."""
        self.epoch = 7
        self._said: dict[str, tuple[int | None, int, int | None]] = {}
        """What each request was told last, about how much of its own, and in which epoch."""
        self._lease_ids = itertools.count(1)
        self._asking = ""
        self.again: dict[str, list[bool]] = {}
        """Of each request's lookups, whether it had asked before."""
        self._names: dict[int, str] = {}
        """Of requests, by the id of the message that asks for them; empty for what nobody waits for any more:
        its lease is given back when it comes."""

    def prompt(self, name: str, blocks: int = BLOCKS) -> list[bytes]:
        number = 1_000 * (len(self.prompts) + 1)
        joined = hashes(*range(number, number + blocks))
        self.prompts[name] = [joined[at : at + 32] for at in range(0, len(joined), 32)]
        return self.prompts[name]

    def match(self, name: str, local: int = 0) -> int | None:
        prompt = self.prompts[name]
        self._asking = name
        said, local_then, epoch_then = self._said.get(name, (None, 0, None))
        settled = self.matcher.holds(name) and (local, self.peer.session.epoch) == (local_then, epoch_then)
        lookups = len(self.asked_s.get(name, []))
        found = self.matcher.match(cast(Client, self), name, prompt, local, len(prompt))
        self.serve()
        if settled:  # the scheduler's side takes the last answer, and does not ask here
            assert said
            assert (found, len(self.asked_s[name])) == (said, lookups)
        self._said[name] = found, local, self.peer.session.epoch
        return found

    def step(self, seconds: float = STEP_S) -> None:
        if self._due_s > self.peer.now_s and not self.deaf:  # what is due meanwhile is there then
            passed_s = min(seconds, self._due_s - self.peer.now_s)
            self.peer.now_s += passed_s
            seconds -= passed_s
            self.serve()
        self.peer.now_s += seconds
        self.matcher.next_step()

    def run(self, name: str, seconds: float, step_s: float = STEP_S) -> int | None:
        """Steps until there is an answer, for so long at most."""
        until_s = self.peer.now_s + seconds
        while (found := self.match(name)) is None and self.peer.now_s < until_s:
            self.step(step_s)
        return found

    def lost(self) -> None:
        """The daemon dies."""
        self.leases.clear()
        self.peer.session.lost("killed")

    def back(self) -> None:
        self.epoch += 1
        self.peer.welcome(epoch=self.epoch)

    # --- the client, as the matcher sees it ---

    def known_run(
        self, wanted: Sequence[bytes], first: int, end: int, *, group: int, counted: bool
    ) -> int | None:
        assert group == 0
        if self.index is None:
            return None
        known = next((at for at in range(end - first) if wanted[first + at] not in self.index), end - first)
        self.spared += counted and not known
        return known

    def knows_any(self, wanted: Sequence[bytes], *, group: int) -> bool | None:
        assert group == 0
        self.pages_read += 1
        return None if self.index is None else not self.index.isdisjoint(wanted)

    def start_lookup(
        self,
        wanted: Sequence[bytes],
        queries: Sequence[GroupQuery],
        *,
        lease: bool,
        host_only: bool,
        again: bool,
    ) -> Any:
        assert not host_only
        self.again.setdefault(self._asking, []).append(again)
        record = self.peer.session.lookup(b"".join(wanted), queries, lease=lease)
        number = self.peer.session._next_id - 1
        self._names[number] = self._asking
        self._due_s = self.peer.now_s + self.slow_s
        return Call(self.peer.session, record, self.wait, lambda: self._names.update({number: ""}))

    # --- the daemon ---

    def wait(self, timeout_s: float) -> None:
        """Lets time pass until everything is answered, at most so much."""
        passed_s = min(timeout_s, max(0.0, self._due_s - self.peer.now_s))
        self.waited_s += passed_s
        self.peer.now_s += passed_s
        self.serve()

    def serve(self) -> None:
        """Answers what was sent, in order, if the last of it is due."""
        if self.deaf or self.peer.now_s < self._due_s:
            return
        for message in self.peer.sent():
            for lease in message.released_leases:
                del self.leases[lease]
            if message.HasField("lookup"):
                self._answer(message)

    def _answer(self, message: cache_pb2.AttachRequest) -> None:
        joined = message.lookup.hashes
        asked = [joined[at : at + 32] for at in range(0, len(joined), 32)]
        name = self._names[message.id]
        self.asked_s.setdefault(name, []).append(self.peer.now_s)
        said = [self.states.get(one, HIT) for one in asked]
        hits = next((at for at, state in enumerate(said) if state != HIT), len(said))
        lease_id = 0
        if hits:
            assert not name or name not in self.leases.values(), "a second lease for one request"
            lease_id = next(self._lease_ids)
            self.leases[lease_id] = name
        answer = cache_pb2.GroupAnswer(hits=hits, states=bytes(said[: hits + 1]))
        self.peer.say(message.id, lookup=cache_pb2.LookupResponse(answers=[answer], lease_id=lease_id))


@pytest.fixture
def world(scheduler: Peer) -> World:
    return World(scheduler)


def test_a_request_waits_for_blocks_on_their_way_and_gets_them(world: World) -> None:
    prompt = world.prompt("r")
    for block in prompt[4:]:
        world.states[block] = PENDING
    assert world.run("r", 0.1) is None
    world.states.clear()
    assert world.run("r", 0.1) == BLOCKS
    assert len(world.leases) == 1
    assert (world.matcher.counters.waits, world.matcher.counters.waits_in_vain) == (1, 0)
    first, *later = world.again["r"]
    assert not first
    assert later
    assert all(later), "it uses its blocks once, however often it asks"


def test_what_the_index_does_not_know_is_not_asked_for(world: World) -> None:
    prompt = world.prompt("r")
    world.index = set()
    for _ in range(3):
        assert world.match("r") == 0
        world.step()
    assert world.asked_s == {}
    assert (world.matcher.counters.lookups, world.matcher.counters.local, world.spared) == (0, 1, 1)
    world.index |= set(prompt[:5])
    for block in prompt[5:]:
        world.states[block] = MISS
    assert world.run("r", 0.1) == 5
    assert len(world.asked_s["r"]) == 1
    assert len(world.leases) == 1


def test_a_lease_outlives_what_the_index_says_later(world: World) -> None:
    prompt = world.prompt("r")
    world.index = set(prompt)
    assert world.run("r", 0.1) == BLOCKS
    world.index = set()
    assert world.match("r", 3) == BLOCKS - 3
    assert world.match("r") == BLOCKS, "it is held"
    world.lost()
    world.back()
    assert world.match("r") == 0
    assert world.leases == {}


def test_of_what_the_index_knows_no_more_is_asked_for(world: World) -> None:
    prompt = world.prompt("r")
    world.index = set(prompt[:7])
    assert world.run("r", 0.1) == 7, "the daemon would have told more"


def test_it_does_not_wait_for_what_is_missing(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = MISS
    world.states[prompt[5]] = PENDING
    assert world.match("r") == 4
    assert not world.matcher.counters.waits


def test_it_takes_what_there_is_when_its_patience_is_over_and_waits_no_more(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    started_s = world.peer.now_s
    assert world.run("r", 10) == 4
    assert PENDING_WAIT_S <= world.peer.now_s - started_s < PENDING_WAIT_S + 0.1
    assert world.matcher.counters.waits_in_vain == 1
    asked = len(world.asked_s["r"])
    for _ in range(300):
        world.step(0.01)
        assert world.match("r") == 4
    assert len(world.asked_s["r"]) == asked, "its lease is kept, and nothing is asked again"
    world.matcher.drop("r")  # preempted, say
    assert world.match("r") == 4


def test_it_waits_no_longer_than_computing_takes(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    world.matcher.block_s = lambda: 0.05
    started_s = world.peer.now_s
    assert world.run("r", 10) == 4
    assert (BLOCKS - 4) * 0.05 <= world.peer.now_s - started_s < (BLOCKS - 4) * 0.05 + 0.1
    assert world.matcher._stuck == {}, "a request with more to compute waits for it all the same"
    prompt = world.prompt("not at all")
    world.states[prompt[4]] = PENDING
    world.matcher.step_s = lambda: (BLOCKS - 4) * 0.05
    assert world.match("not at all") == 4, "before the next step it is computed"


def test_hits_that_are_not_worth_a_load_are_counted_once(world: World) -> None:
    prompt = world.prompt("few")
    world.index = set(prompt[:3])
    client = cast(Client, world)
    for _ in range(3):
        assert world.matcher.match(client, "few", prompt, 0, BLOCKS, 4) == 0
        world.step()
    assert world.asked_s == {}, "nobody is asked"
    assert world.matcher.counters.left == 1
    prompt = world.prompt("short")
    world.index = set(prompt)
    assert world.matcher.match(client, "short", prompt, BLOCKS - 2, BLOCKS, 4) == 0
    assert world.matcher.counters.left == 2
    prompt = world.prompt("none")
    assert world.matcher.match(client, "none", prompt, BLOCKS - 2, BLOCKS, 4) == 0
    assert world.matcher.match(client, "none", prompt, 0, BLOCKS, 4) == 0
    assert world.matcher.counters.left == 2


def test_no_patience_at_all(scheduler: Peer) -> None:
    world = World(scheduler, pending_wait_s=0)
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    assert world.match("r") == 4


def test_it_asks_seldom_and_ever_more_seldom(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[0]] = PENDING
    assert world.run("r", 10) == 0
    asked = world.asked_s["r"]
    between = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert min(between) >= PENDING_POLL_S - 1e-9
    assert max(between) <= PENDING_WAIT_S / 7
    assert len(asked) < 50
    assert world.matcher.counters.lookups == 1, "which the log counts to say that nothing is ever found"


def test_long_steps_do_not_make_it_take_what_is_old(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    assert world.match("r") is None
    world.states.clear()
    world.step(3 * PENDING_WAIT_S)
    assert world.match("r") == BLOCKS


def test_the_engines_own_part_may_grow_and_shrink_meanwhile(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[6]] = PENDING
    assert world.match("r", local=2) is None
    world.step(PENDING_POLL_S)
    assert world.match("r", local=4) is None
    world.step()
    assert world.match("r", local=1) is None
    world.states.clear()
    world.step(PENDING_POLL_S)
    assert world.match("r", local=1) == BLOCKS - 1
    assert world.match("r", local=3) == BLOCKS - 3
    assert len(world.leases) == 1


def test_a_hit_that_shrinks_is_believed(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[6]] = PENDING
    assert world.match("r") is None
    world.states = {prompt[2]: MISS}
    assert world.run("r", 0.1) == 2
    world.matcher.drop("r")
    world.states = {prompt[6]: PENDING}
    assert world.match("r") is None
    world.states = {prompt[0]: MISS}
    assert world.run("r", 0.1) == 0
    world.serve()
    assert not world.leases


def test_a_daemon_that_dies_meanwhile_is_a_miss_at_once(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    assert world.run("r", 0.5) is None
    world.lost()
    assert world.run("r", 0.5) == 0
    world.back()
    world.matcher.drop_all()  # as the scheduler's side does in a new epoch
    world.states.clear()
    assert world.match("r") == BLOCKS


def test_a_daemon_that_dies_with_the_question_is_a_miss(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    assert world.match("r") is None
    world.deaf = True
    world.step(PENDING_POLL_S)
    assert world.match("r") is None
    world.lost()
    world.step()
    assert world.match("r") == 0


def test_a_daemon_that_answers_no_more_is_given_up(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    assert world.match("r") is None
    world.deaf = True
    world.step(PENDING_POLL_S)
    assert world.run("r", 2 * ANSWER_DEADLINE_S) == 0
    world.deaf = False
    world.serve()
    world.serve()  # the lease that came too late
    assert not world.leases


def test_a_restarted_daemon_does_not_make_a_request_wait_from_the_beginning(world: World) -> None:
    prompt = world.prompt("r")
    world.states[prompt[4]] = PENDING
    started_s = world.peer.now_s
    assert world.run("r", 0.9 * PENDING_WAIT_S) is None
    world.lost()
    world.matcher.drop_all()
    world.back()
    assert world.run("r", 10) == 4
    assert world.peer.now_s - started_s < PENDING_WAIT_S + 0.1


def test_one_request_pays_for_a_block_that_is_stuck(world: World) -> None:
    prompt = world.prompt("first")
    world.prompts["second"] = prompt
    world.states[prompt[4]] = PENDING
    assert world.run("first", 10) == 4
    world.matcher.forget("first")
    assert world.match("second") == 4, "nobody waits for that block again"
    world.matcher.forget("second")
    world.step(STUCK_S)
    assert world.match("second") is None, "but for a while only"


def test_a_block_that_came_last_is_not_stuck(world: World) -> None:
    """A long prefix on its way up: when the patience is over it has got as far as that."""
    prompt = world.prompt("first")
    world.prompts["second"] = prompt
    world.states[prompt[4]] = PENDING
    assert world.run("first", 0.9 * PENDING_WAIT_S) is None
    world.states = {prompt[5]: PENDING}
    assert world.run("first", 10) == 5
    world.matcher.forget("first")
    assert world.match("second") is None


@pytest.mark.parametrize("step_s", [STEP_S, 0.1], ids=["idle", "busy"])
def test_many_that_wait_share_the_questions_fairly(world: World, step_s: float) -> None:
    names = [f"r{index}" for index in range(5 * POLLS_MAX)]
    for name in names:
        world.states[world.prompt(name)[1]] = PENDING
    started_s = world.peer.now_s
    waiting = set(names)
    while waiting and world.peer.now_s - started_s < 10:
        polls = world.matcher.counters.polls
        for name in sorted(waiting):
            if world.match(name) is not None:
                waiting.remove(name)
        assert world.matcher.counters.polls - polls <= POLLS_MAX
        world.step(step_s)
    assert not waiting
    assert world.peer.now_s - started_s < PENDING_WAIT_S + 1.0 + 10 * step_s
    seconds = PENDING_WAIT_S - 5 * step_s
    polls_of = [sum(at - started_s < seconds for at in world.asked_s[name]) for name in names]
    assert min(polls_of) >= max(polls_of) / 2
    assert min(polls_of) >= 3
    assert sum(polls_of) <= len(names) + POLLS_MAX * seconds / max(PENDING_POLL_S, step_s) + POLLS_MAX


def test_those_that_wait_do_not_hold_up_new_ones(world: World) -> None:
    for index in range(STARTS_MAX):
        name = f"old{index}"
        world.states[world.prompt(name)[1]] = PENDING
        assert world.match(name) is None
    world.step(0.1)
    for index in range(STARTS_MAX):
        assert world.match(f"old{index}") is None
    world.prompt("new")
    assert world.match("new") == BLOCKS


def test_a_request_that_goes_on_without_an_answer_leaves_no_lease(world: World) -> None:
    """vLLM may ignore what it is told (prompt_logprobs, say), also that the answer is on its way."""
    world.prompt("r")
    world.deaf = True
    assert world.match("r") is None
    assert world.matcher.take("r") is None
    world.deaf = False
    world.serve()
    world.serve()
    assert not world.leases
    assert not world.matcher._matches


ACTIONS = st.one_of(
    st.tuples(st.just("match"), st.integers(0, 2), st.integers(0, BLOCKS)),
    st.tuples(st.just("step"), st.sampled_from([0.0005, 0.003, 0.02, 0.3, 1.5]), st.just(0)),
    st.tuples(st.just("state"), st.integers(0, 2 * BLOCKS - 1), st.sampled_from([MISS, PENDING, HIT])),
    st.tuples(st.sampled_from(["take", "drop", "forget"]), st.integers(0, 2), st.just(0)),
    st.tuples(st.sampled_from(["deaf", "hearing", "lost"]), st.just(0), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=120))
def test_whatever_happens_nobody_waits_too_long_and_no_lease_is_left(actions: list[tuple[Any, ...]]) -> None:
    peer = Peer(Role.SCHEDULER)
    peer.welcome()
    world = World(peer)
    names = ["a", "b", "c"]
    blocks = [block for name in names for block in world.prompt(name)]
    try:
        for what, one, two in actions:
            match what:
                case "match":
                    found = world.match(names[one], two)
                    assert found is None or 0 <= found <= BLOCKS - two
                case "step":
                    world.step(one)
                case "state":
                    world.states[blocks[one]] = two
                case "take":
                    grant = world.matcher.take(names[one])
                    if grant is not None:
                        grant.lookup.release()
                case "drop":
                    world.matcher.drop(names[one])
                case "forget":
                    world.matcher.forget(names[one])
                case "lost":
                    world.lost()
                    world.matcher.drop_all()
                    world.back()
                case _:
                    world.deaf = what == "deaf"
            assert sum(bool(name) for name in world.leases.values()) <= len(names)
        world.deaf = False
        peer.sent()
        world.lost()
        world.matcher.drop_all()
        world.back()
        for state in (PENDING, HIT):
            world.states = dict.fromkeys(blocks, state)
            started_s = peer.now_s
            for name in names:
                assert world.run(name, 60) is not None
            assert peer.now_s - started_s <= len(names) * (PENDING_WAIT_S + 0.1)
        for name in names:
            world.matcher.forget(name)
        world.serve()
        assert not world.leases
        assert not world.matcher._matches
        assert not world.matcher._waiting
        assert not world.matcher._since_s
        assert peer.session.status().leases == 0
    finally:
        peer.close()


def test_what_is_settled_is_not_asked_again_until_the_lease_is_gone(world: World) -> None:
    world.prompt("r")
    assert not world.matcher.holds("r")
    assert world.run("r", 0.1) == BLOCKS
    assert world.matcher.holds("r")
    world.step(LEASE_AGE_MAX_S + STEP_S)
    assert not world.matcher.holds("r"), "it is too old"
    assert world.run("r", 0.1) == BLOCKS
    assert world.matcher.holds("r")
    world.matcher.drop("r")
    assert not world.matcher.holds("r")
    assert world.run("r", 0.1) == BLOCKS
    assert world.matcher.take("r") is not None
    assert not world.matcher.holds("r")


def test_what_is_on_its_way_is_not_settled(world: World) -> None:
    for block in world.prompt("r")[4:]:
        world.states[block] = PENDING
    assert world.run("r", 0.1) is None
    assert not world.matcher.holds("r")


def test_a_miss_stays_one_as_long_as_the_index_page_says_so(world: World) -> None:
    prompt, client = world.prompt("r"), cast(Client, world)
    world.index = set()
    assert not world.matcher.misses(client, "r"), "it has not been asked about"
    assert world.match("r") == 0
    world.step()
    assert world.matcher.misses(client, "r")
    assert world.spared == 1, "it is one lookup, however often vLLM asks"
    world.index = None
    world.step()
    assert not world.matcher.misses(client, "r"), "the page cannot tell"
    world.index = set(prompt[:1])
    world.step()
    assert not world.matcher.misses(client, "r")
    for block in prompt[1:]:
        world.states[block] = MISS
    assert world.run("r", 0.1) == 1


def test_the_index_page_is_read_once_in_a_step_while_it_has_nothing_of_any_request(world: World) -> None:
    names, client = [f"r{number}" for number in range(64)], cast(Client, world)
    prompts = [world.prompt(name) for name in names]
    world.index = set()
    assert [world.match(name) for name in names] == [0] * 64
    world.step()
    before = world.pages_read
    assert all(world.matcher.misses(client, name) for name in names)
    assert world.pages_read == before + 1
    world.index = set(prompts[5][:1])
    world.step()
    assert [name for name in names if not world.matcher.misses(client, name)] == ["r5"]
    world.matcher.drop("r5")
    world.step()
    before = world.pages_read
    assert sum(world.matcher.misses(client, name) for name in names) == 63, (
        "a forgotten one is not asked about"
    )
    assert world.pages_read == before + 1


@given(
    st.sampled_from([(16, 1), (32, 2), (64, 4)]),
    st.integers(0, 5),
    st.integers(1, 5),
    st.sets(st.integers(0, 47)),
)
def test_a_head_is_known_if_and_only_if_some_of_the_prompt_is(
    block: tuple[int, int], first: int, units: int, there: set[int]
) -> None:
    """Where a block is one, two or four of those that vLLM hashes, and a unit is as long as one block."""
    tokens, stride = block
    question = Question(Groups((GroupShape(0, tokens, hash_stride=stride),), 16))
    prompt = [number.to_bytes(32) for number in range(48)]
    page = Page({prompt[at] for at in there})
    client = cast(Client, page)
    known = question.known(client, prompt, first, first + units, counted=False)
    assert (known == 0) == question.none_known(client, [question.head(prompt, first)])


def waited_s(world: World, requests: int, names: Iterator[int]) -> float:
    """For how long so many requests, one after another, make the scheduler wait."""
    before_s = world.waited_s
    for number in itertools.islice(names, requests):
        world.prompt(f"r{number}")
        assert world.run(f"r{number}", 1.0, 10 * world.matcher.budget_s) == BLOCKS
        world.matcher.forget(f"r{number}")
        world.step()
    return world.waited_s - before_s


def test_a_step_waits_for_answers_only_if_they_come_within_its_budget(world: World) -> None:
    budget_s, names = world.matcher.budget_s, itertools.count()
    world.slow_s = 0.6 * budget_s
    assert waited_s(world, 50, names) == pytest.approx(50 * world.slow_s)
    world.slow_s = 3 * budget_s
    assert waited_s(world, 50, names) < 25 * budget_s, "it soon leaves off"
    assert waited_s(world, 50, names) < 10 * budget_s, "but tries again now and then"
    world.slow_s = 0.6 * budget_s
    waited_s(world, 50, names)
    assert waited_s(world, 50, names) == pytest.approx(50 * world.slow_s)


def test_a_step_in_which_nothing_runs_waits_longer(world: World) -> None:
    world.slow_s = 8 * world.matcher.budget_s
    world.prompt("r")
    world.matcher.nothing_runs()
    assert world.match("r") == BLOCKS, "without another step"
    world.slow_s, world.waited_s = 100 * world.matcher.budget_s, 0.0
    world.prompt("later")
    world.step()
    world.matcher.nothing_runs()
    assert world.match("later") is None
    assert world.waited_s == pytest.approx(IDLE_BUDGETS * world.matcher.budget_s)
