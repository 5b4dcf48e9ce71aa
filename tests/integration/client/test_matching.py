"""Lookups of the vLLM connector for requests that wait: a few begun in each step, no lease left behind."""

from __future__ import annotations

from kvtier_vllm.matching import STARTS_MAX, Matcher

from tests.integration.client.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import block_hashes

REQUESTS = 5 * STARTS_MAX


def test_a_burst_of_requests_begins_a_few_lookups_in_each_step(
    shared_host: DaemonHost, connect_to: Connect
) -> None:
    plain = connect_to(shared_host)
    stored = block_hashes("burst", range(4))
    assert plain.client.store(stored, list(range(4))).wait(30).done
    matcher = Matcher(budget_s=0.0)
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
