"""What is counted for each tenant, and what its status says."""

from __future__ import annotations

import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.blocks import tenant_tallies
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.blocks.tenant_tallies import TenantTallies
from kvtierd.core.blocks.tenants import TenantShare
from kvtierd.core.ids import TenantTag
from kvtierd.core.status import TenantStatus, TenantTally
from kvtierd.core.stimuli import EndSession, Owner

from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Host, released

A, B = Owner("a", 1), Owner("b", 2)
BLOCK_BYTES = 4096
TAKEN_BYTES = (1 << 16) // 14
"""What is lost at the end of an extent is shared by its 14 slots."""


def by_name(host: Host) -> dict[str, TenantStatus]:
    return {each.name: each for each in host.machine.status().tenants}


def test_each_tenants_blocks_and_calls_are_its_own() -> None:
    host = DiskHost(NativeTable)
    one, other = host.instance("one", owner=A), host.instance("other", owner=B)
    host.stored_on_disk(one, 1, 2, 3, 4)
    lease = one.lease(1, 2)
    one.lookup(7)
    assert other.lookup(1, 2, 3).hits == 0
    found = by_name(host)
    assert list(found) == ["a", "b"]
    assert found["a"].counters == TenantTally(
        lookup_hashes=3, lookup_hits=2, stored_blocks=4, stored_bytes=4 * BLOCK_BYTES
    )
    assert found["b"].counters == TenantTally(lookup_hashes=3)
    assert (found["a"].host_blocks, found["a"].disk_blocks) == (4, 4)
    assert found["a"].host_bytes == found["a"].disk_bytes == pytest.approx(4 * TAKEN_BYTES, abs=4)
    assert found["a"].leased_bytes == pytest.approx(2 * TAKEN_BYTES, abs=2)
    assert (found["b"].host_bytes, found["b"].disk_bytes, found["b"].leased_bytes) == (0, 0, 0)
    assert (found["a"].guaranteed_fraction, found["a"].most_fraction) == (0.5, 1.0)
    assert (found["a"].instances, found["a"].sessions) == (1, 1)
    one.load(lease, [0, 1]).finish()
    assert by_name(host)["a"].counters.loaded_bytes == 2 * BLOCK_BYTES
    totals, each = host.counters, [status.counters for status in by_name(host).values()]
    for name in TenantTally.__dataclass_fields__:
        assert getattr(totals, name) == sum(getattr(one, name) for one in each), name


def test_evicted_blocks_are_counted_for_those_whose_they_were() -> None:
    host = Host(NativeTable)
    victim, busy = host.instance("one", owner=A), host.instance("other", owner=B)
    victim.stored(*range(56))
    busy.stored(*range(100, 108))
    found = by_name(host)
    assert found["a"].counters.evicted_blocks == 8
    assert found["b"].counters.evicted_blocks == 0
    assert host.counters.evicted_blocks == 8


def test_what_a_tenant_has_stays_when_its_engines_go() -> None:
    host = Host(NativeTable, shares={"a": TenantShare(0.25, 0.75)})
    one = host.instance("one", owner=A)
    one.stored(1, 2)
    host.do(EndSession(one.scheduler, "stopped"))
    host.do(released(one))
    [status] = host.machine.status().tenants
    assert (status.name, status.tag, status.host_blocks) == ("a", tag_of("a"), 2)
    assert (status.instances, status.sessions) == (0, 0)
    assert (status.guaranteed_fraction, status.most_fraction) == (0.25, 0.75)
    assert status.counters.stored_blocks == 2


def test_so_many_are_counted_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_tallies, "TENANTS_COUNTED_MAX", 3)
    tallies = TenantTallies()
    for number in range(1, 6):
        tallies.name(TenantTag(number), f"tenant {number}").stored_blocks += 1
    assert list(tallies) == [1, 2, 3]
    assert [tallies.copy_of(TenantTag(number)).stored_blocks for number in range(1, 6)] == [1, 1, 1, 0, 0]
    assert (tallies.name_of(TenantTag(3)), tallies.name_of(TenantTag(4))) == ("tenant 3", "")
    tallies.of(TenantTag(5)).stored_blocks += 1
    assert tallies.copy_of(TenantTag(5)) == TenantTally(), "nobody is told what others have done"
