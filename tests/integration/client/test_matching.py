"""Lookups of the vLLM connector for requests that wait: a few begun in each step, no lease left behind."""

from __future__ import annotations

import pytest
from kvtier import Doorbell, Lookup
from kvtier_vllm.groups import Groups
from kvtier_vllm.scheduler import matching
from kvtier_vllm.scheduler.matching import STARTS_MAX, Matcher
from kvtier_vllm.scheduler.question import Question

from tests.integration.client.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import block_hashes

REQUESTS = 5 * STARTS_MAX
QUESTION = Question(Groups.one(16))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that is given up is a miss for good: on a busy machine an answer takes longer than 0.2 s."""
    monkeypatch.setattr(matching, "ANSWER_DEADLINE_S", 60.0)


def test_a_burst_of_requests_begins_a_few_lookups_in_each_step(
    shared_host: DaemonHost, connect_to: Connect
) -> None:
    plain = connect_to(shared_host)
    stored = block_hashes("burst", range(4))
    assert plain.client.store(stored, list(range(4))).wait(30).done
    matcher = Matcher(QUESTION, budget_s=0.0)
    waiting = {f"request {number}" for number in range(REQUESTS)}

    def step() -> bool:
        before = matcher.counters.lookups
        for request in sorted(waiting):
            found = matcher.match(plain.client, request, stored, 0, len(stored))
            if found is not None:
                assert found == len(stored)
                waiting.remove(request)
        assert matcher.counters.lookups - before <= STARTS_MAX
        matcher.next_step()
        return not waiting

    until(step, "every request has its answer")
    assert matcher.counters.lookups == REQUESTS
    assert shared_host.status().leases == REQUESTS
    matcher.drop_all()
    until(lambda: shared_host.status().leases == 0, "every lease is given back")


def test_a_request_waits_for_what_another_engine_is_storing(
    shared_host: DaemonHost, connect_to: Connect
) -> None:
    writer, reader = connect_to(shared_host, "writer"), connect_to(shared_host, "reader")
    prefix = block_hashes("in the making", range(6))
    assert writer.client.store(prefix[:2], [0, 1]).wait(30).done
    storing = writer.client.store(prefix[2:], [2, 3, 4, 5], doorbell=Doorbell(0, 7))
    until(lambda: storing.results is not None, "the daemon has accepted it")
    matcher = Matcher(QUESTION, budget_s=0.01, pending_wait_s=60)

    def ask() -> int | None:
        matcher.next_step()
        return matcher.match(reader.client, "r", prefix, 0, len(prefix))

    until(lambda: ask() is None and matcher.counters.waits, "it waits")
    until(lambda: ask() is None and matcher.counters.polls > 3, "it asks again and again")
    writer.client.ring(0, 7)
    until(lambda: (found := ask()) is not None and found == len(prefix), "it gets all of it")
    assert reader.client.status.leases == 1
    matcher.forget("r")


def test_a_request_takes_what_there_is_of_a_store_that_does_not_end(
    shared_host: DaemonHost, connect_to: Connect
) -> None:
    writer, reader = connect_to(shared_host, "writer"), connect_to(shared_host, "reader")
    prefix = block_hashes("never made", range(4))
    assert writer.client.store(prefix[:2], [0, 1]).wait(30).done
    storing = writer.client.store(prefix[2:], [2, 3], doorbell=Doorbell(0, 9))
    until(lambda: storing.results is not None, "the daemon has accepted it")
    matcher = Matcher(QUESTION, budget_s=0.01, pending_wait_s=0.3)
    answers: list[int | None] = []

    def over() -> bool:
        matcher.next_step()
        answers.append(matcher.match(reader.client, "r", prefix, 0, len(prefix)))
        return answers[-1] is not None

    until(over, "its patience is over")
    assert answers[-1] == 2
    assert None in answers
    grant = matcher.take("r")
    assert grant is not None
    assert reader.client.load(grant.lookup, [0, 1]).wait(30).done
    storing.revoke()


def test_a_lookup_tells_what_is_pending(shared_host: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(shared_host)
    prefix = block_hashes("half", range(3))
    assert plain.client.store(prefix[:1], [0]).wait(30).done
    storing = plain.client.store(prefix[1:2], [1], doorbell=Doorbell(0, 1))
    found: list[Lookup] = []

    def told() -> bool:
        found.append(plain.lookup(prefix))
        return found[-1].pending

    until(told, "the store was accepted")
    assert found[-1].hits == 1
    assert not plain.lookup(prefix[2:]).pending
    plain.client.ring(0, 1)
    assert storing.wait(30).done
    assert not plain.lookup(prefix).pending


def test_a_request_that_keeps_missing_is_counted_once_and_found_when_it_is_there(
    shared_host: DaemonHost, connect_to: Connect
) -> None:
    plain = connect_to(shared_host)
    prompt = block_hashes("not yet", range(4))
    until(lambda: plain.client.known_run(prompt, counted=False) == 0, "the index page can tell")
    told = plain.client.status.counters.lookups_local
    matcher = Matcher(QUESTION, budget_s=0.01)

    def ask() -> int | None:
        matcher.next_step()
        return matcher.match(plain.client, "r", prompt, 0, len(prompt))

    def misses() -> bool:
        matcher.next_step()
        return matcher.misses(plain.client, "r")

    assert [ask() for _ in range(3)] == [0, 0, 0]
    assert matcher.misses(plain.client, "r")
    assert plain.client.status.counters.lookups_local == told + 1
    assert not matcher.misses(plain.client, "another")
    assert plain.client.store(prompt, list(range(4))).wait(30).done
    until(lambda: not misses(), "the page tells that it is there")
    until(lambda: ask() == 4, "it is found")
    assert plain.client.status.counters.lookups_local == told + 1
    matcher.forget("r")
