"""The list of waiting parts, against a plain list of the same parts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import SharedWords
from kvtierd.workers.copy.gates import (
    BELLS_PER_POLL,
    PARTS_PER_SWEEP,
    POLL_S_MAX,
    POLL_S_MIN,
    SWEEP_S,
    Gates,
)
from kvtierd.workers.copy.parts import PartTask
from kvtierd.workers.copy.sessions import MappedSession

DOORBELLS = 3
PARTS = 64


def session(number: int = 1, tenant: int = 0, doorbells: int = DOORBELLS) -> MappedSession:
    words = SharedWords(bytearray(8 * (doorbells + PARTS)), doorbells + PARTS)
    return MappedSession(number, doorbells, PARTS, tenant, words)


def part(
    owner: MappedSession, ticket: int, doorbell: int = 0, value: int = 1, deadline_s: float = 1e9
) -> PartTask:
    nothing = np.empty(0, np.uint32)
    return PartTask(
        number=ticket,
        is_load=True,
        session=owner,
        plan=None,
        ticket=ticket,
        word=DOORBELLS + ticket % PARTS,
        doorbell=doorbell,
        doorbell_value=value,
        gate_deadline_s=deadline_s,
        block_ids=nothing,
        slots=nothing,
        generations=nothing.astype(np.uint64),
        verify=None,
    )


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, DOORBELLS - 1), st.integers(0, 9)), max_size=40),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, DOORBELLS - 1), st.integers(0, 9)), max_size=20),
)
def test_parts_leave_when_their_doorbell_rings_and_not_before(
    posted: list[tuple[int, int, int]], rings: list[tuple[int, int, int]]
) -> None:
    sessions = [session(0), session(1)]
    gates = Gates()
    waiting = [part(sessions[s], i + 1, bell, value) for i, (s, bell, value) in enumerate(posted)]
    for one in waiting:
        gates.add(one, 0.0)
    for s, bell, value in [(0, 0, 0), *rings]:
        words = sessions[s].words
        assert words is not None
        words.ring(bell, value)
        due = [one for one in waiting if one.doorbell_value <= one.session.load_word(one.doorbell or 0)]
        assert gates.opened(0.0) == due  # in the order of arrival
        waiting = [one for one in waiting if one not in due]
        assert bool(gates) == bool(waiting)
    assert {one.number for one in gates.take(lambda _: True)} == {one.number for one in waiting}
    assert not gates


def test_a_sweep_takes_out_what_is_late_or_revoked() -> None:
    owner = session()
    late, revoked, patient = part(owner, 1, deadline_s=5.0), part(owner, 2), part(owner, 3)
    gates = Gates()
    for one in (late, revoked, patient):
        gates.add(one, 0.0)
    assert gates.swept(1.0) == []
    assert owner.revoke(revoked.word, revoked.ticket)
    assert gates.swept(1.0 + SWEEP_S / 2) == []  # not at every poll
    assert gates.swept(2.0) == [revoked]
    assert gates.swept(5.0) == [late]
    assert gates.take(lambda _: True) == [patient]


def test_a_crowd_of_parts_makes_nobody_else_wait() -> None:
    """One poll and one sweep look at a bounded part of a crowd, and at all of another tenant's parts; after a
    few of them the whole crowd was looked at."""
    bells = 4 * BELLS_PER_POLL
    crowd, victim = session(1, tenant=1, doorbells=bells), session(2, tenant=2)
    gates = Gates()
    for number in range(4 * PARTS_PER_SWEEP):
        gates.add(part(crowd, number + 1, number % bells, 1 + number % 2, deadline_s=5.0), 0.0)
    own = part(victim, 1)
    gates.add(own, 0.0)
    assert victim.words is not None
    assert crowd.words is not None
    victim.words.ring(0, 1)
    for bell in range(bells):
        crowd.words.ring(bell, 1)
    opened = gates.opened(1.0)
    assert own in opened
    assert len(opened) <= 1 + BELLS_PER_POLL * 2
    polls = 1
    while len(opened) < 1 + 2 * PARTS_PER_SWEEP:
        opened += gates.opened(1.0)
        polls += 1
    assert polls <= 5
    assert len(gates.swept(10.0)) == PARTS_PER_SWEEP
    late = [len(gates.swept(10.0 + number)) for number in (1, 2, 3, 4)]
    assert sum(late) == PARTS_PER_SWEEP, "and none was lost"
    assert not gates


def test_polls_become_rarer_while_nothing_happens_and_stop_with_the_last_part() -> None:
    owner = session()
    gates = Gates()
    assert gates.wait_s(0.0) is None
    gates.add(part(owner, 1), 10.0)
    waits = [gates.wait_s(10.0 + quiet_s) for quiet_s in (0.0, 1e-3, 4e-3, 1.0, 100.0)]
    assert waits[0] == POLL_S_MIN
    assert waits[-1] == POLL_S_MAX
    assert all(w is not None and POLL_S_MIN <= w <= POLL_S_MAX for w in waits)
    assert waits == sorted(waits, key=lambda w: w or 0.0)
    gates.take(lambda _: True)
    assert gates.wait_s(200.0) is None


def test_words_that_say_nonsense_neither_open_nor_break_a_gate() -> None:
    owner = session()
    assert owner.words is not None
    one = part(owner, 1)
    owner.words.store(one.word, 1 << 8 | 0xEE)
    gates = Gates()
    gates.add(one, 0.0)
    assert gates.swept(1.0) == []
    assert gates.opened(1.0) == []
    assert not owner.try_start(one.word, one.ticket)
    assert not owner.revoke(one.word, one.ticket)
    assert owner.overwritten_words == 1
