"""When the core is idle, so that ticks come more rarely."""

from __future__ import annotations

from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.stimuli import CoreIntegrity, ReleaseLeases, Tick

from tests.unit.core.disk import SLAB
from tests.unit.core.host import Host


def idle(host: Host) -> bool:
    return host.machine.is_idle


def test_it_is_idle_while_nothing_waits_for_a_tick() -> None:
    host = Host(NativeTable, integrity=CoreIntegrity(sample_bytes_per_s=1 << 20))
    assert idle(host)
    one = host.instance()
    assert idle(host), "engines that do nothing"
    running = one.store(1, 2)
    assert not idle(host)
    running.finish()
    assert idle(host)
    lease = one.lease(1)
    assert not idle(host), "it may expire"
    host.do(ReleaseLeases(one.scheduler, one.epoch, (lease,)))
    host.now_s += 1
    host.do(Tick())
    assert idle(host), "a check is answered by its worker"


def test_with_disks_it_never_is() -> None:
    assert not idle(Host(NativeTable, disks=[SLAB]))
