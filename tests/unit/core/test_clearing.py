"""What an operator drops: from every tier at once, never what somebody holds, and nothing brings it back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.core.actions import ClearReply, FreeSlots
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SpaceId
from kvtierd.core.maintenance.explain import BlockVerdict
from kvtierd.core.stimuli import NOBODY, ClearBlocks, ReleaseLeases

from tests.unit.core.disk import READ, WRITE, DiskHost
from tests.unit.core.host import Host, Instance, keys

Make = Callable[..., DiskHost]


def space_of(instance: Instance, group: int = 0) -> SpaceId:
    return instance.host.machine.core.names[NOBODY, instance.name].plans[group].space


def clear(instance: Instance, *numbers: int, group: int = 0) -> ClearReply:
    """These keys; all that are there if none are named."""
    machine, space = instance.host.machine, space_of(instance, group)
    reply = instance.host.do(ClearBlocks(space, keys(*numbers) if numbers else machine.keys(space)))
    assert isinstance(reply, ClearReply)
    return reply


def counts(reply: ClearReply) -> tuple[int, int, int]:
    return reply.cleared_blocks, reply.held_blocks, reply.under_way_blocks


def test_what_nobody_holds_goes_and_its_slots_are_free(host: Host) -> None:
    one = host.instance()
    one.stored(1, 2, 3)
    reply = clear(one)
    assert (counts(reply), reply.host_bytes, reply.disk_bytes) == ((3, 0, 0), 3 * 4096, 0)
    [freed] = host.of(FreeSlots)
    assert (len(freed.slots), freed.disk) == (3, None)
    assert one.lookup(1, 2, 3).hits == 0
    assert host.machine.status().used_bytes == 0
    assert host.counters.cleared_blocks == 3
    assert host.counters.evicted_blocks == 0
    one.stored(1, 2, 3)
    assert one.hits(1, 2, 3) == [1, 2, 3]


def test_only_the_keys_and_the_space_that_are_named(host: Host) -> None:
    one, other = host.instance(), host.instance("other", fields=b"another")
    one.stored(1, 2, 3)
    other.stored(1, 2, 3)
    assert counts(clear(one, 2, 9, 2)) == (1, 0, 0)
    assert one.hits(1, 2, 3) == [1, 3]
    assert other.hits(1, 2, 3) == [1, 2, 3]


def test_leased_and_loaded_blocks_stay_until_they_are_given_back(host: Host) -> None:
    one = host.instance()
    one.stored(1, 2, 3, 4)
    one.lease(1)
    running = one.load(one.lease(1, 2), [0, 1])
    assert counts(clear(one)) == (2, 2, 0)
    assert one.hits(1, 2, 3, 4) == [1, 2]
    ended = running.finish()
    assert ended.succeeded.all()
    assert counts(clear(one)) == (1, 1, 0)
    host.do(ReleaseLeases(one.scheduler, one.epoch, tuple(host.machine.core.leases)))
    assert counts(clear(one)) == (1, 0, 0)


def test_a_store_under_way_goes_on(host: Host) -> None:
    one = host.instance()
    running = one.store(1, 2)
    assert counts(clear(one)) == (0, 0, 2)
    assert running.finish().succeeded.all()
    assert one.hits(1, 2) == [1, 2]


def test_blocks_of_several_shards_go_wholly(host: Host) -> None:
    pair = host.instance(sizes=((4096, 8192),))
    pair.stored(1, 2)
    reply = clear(pair)
    assert (reply.cleared_blocks, reply.host_bytes) == (2, 2 * 12_288)
    assert host.machine.status().used_bytes == 0


def test_explain_says_that_it_was_cleared(host: Host) -> None:
    one = host.instance()
    one.stored(1)
    clear(one)
    [explanation] = host.machine.explain(keys(1)[0].tobytes()).explanations
    assert explanation.verdict is BlockVerdict.CLEARED


class TestNamespaces:
    def test_all_or_the_one_that_begins_so(self, host: Host) -> None:
        one, other = host.instance(), host.instance("other", fields=b"another")
        digests = [each.namespace for each in host.machine.status().instances]
        assert host.machine.clearable("") == (space_of(one), space_of(other))
        for digest, instance in zip(digests, (one, other), strict=True):
            assert digest is not None
            assert host.machine.clearable(digest.hex()) == (space_of(instance),)

    @pytest.mark.parametrize("namespace", ["ff" * 16, "not hexadecimal"])
    def test_one_that_nobody_knows_is_refused(self, host: Host, namespace: str) -> None:
        host.instance()
        with pytest.raises(Refusal) as refused:
            host.machine.clearable(namespace)
        assert refused.value.reason is Reason.NAMESPACE_INVALID

    def test_a_beginning_that_several_share_is_refused(self, host: Host) -> None:
        for number in range(17):  # of sixteen digits, one begins two digests at least
            host.instance(f"engine-{number}", fields=bytes([number]))
        firsts = [each.namespace.hex()[0] for each in host.machine.status().instances if each.namespace]
        [shared, *_] = [first for first in firsts if firsts.count(first) > 1]
        with pytest.raises(Refusal, match="namespaces begin so"):
            host.machine.clearable(shared)


class TestDisks:
    def test_a_block_goes_from_both_tiers_at_once(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1, 2)
        reply = clear(one)
        assert (counts(reply), reply.host_bytes, reply.disk_bytes) == ((2, 0, 0), 8192, 8192)
        assert {freed.disk for freed in disk_host.of(FreeSlots)} == {None, 0}
        assert disk_host.disk.holds(one, 1, 2) == []
        assert one.lookup(1, 2).states.tolist() == [0]
        assert not disk_host.disk.jobs

    def test_so_does_what_is_on_a_disk_only(self, disk_host: DiskHost) -> None:
        one, filler = disk_host.instance(), disk_host.instance("filler", fields=b"filler")
        disk_host.stored_on_disk(one, 1, 2)
        disk_host.evict_all(filler)
        assert one.hits(1, 2) == []
        assert disk_host.disk.holds(one, 1, 2) == [1, 2]
        reply = clear(one)
        assert (counts(reply), reply.host_bytes, reply.disk_bytes) == ((2, 0, 0), 0, 8192)
        assert one.lookup(1).states.tolist() == [0]

    def test_what_is_being_written_stays_in_both_and_is_clean_then(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1, 2)
        assert counts(clear(one)) == (0, 0, 2)
        disk_host.disk.finish_all()
        assert one.hits(1, 2) == [1, 2]
        assert disk_host.disk.holds(one, 1, 2) == [1, 2]
        assert counts(clear(one)) == (2, 0, 0)

    def test_what_is_being_promoted_stays_in_both(self, disk_host: DiskHost) -> None:
        one, filler = disk_host.instance(), disk_host.instance("filler", fields=b"filler")
        disk_host.stored_on_disk(one, 1, 2)
        disk_host.evict_all(filler)
        assert one.lookup(1, 2).states.tolist() == [1]
        assert disk_host.disk.open_jobs(READ)
        assert counts(clear(one)) == (0, 0, 2)
        disk_host.disk.finish_all()
        assert one.hits(1, 2) == [1, 2]

    def test_a_leased_block_keeps_its_copy_on_the_disk(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1, 2)
        one.lease(1)
        assert counts(clear(one)) == (1, 1, 0)
        assert disk_host.disk.holds(one, 1, 2) == [1]

    def test_a_disk_without_a_worker_is_cleared_too(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1, 2)
        disk_host.disk.pause()
        assert counts(clear(one)) == (2, 0, 0)
        disk_host.disk.resume()
        assert one.lookup(1).states.tolist() == [0]

    def test_what_a_lost_worker_was_writing_stays_until_its_process_is_gone(
        self, disk_host: DiskHost
    ) -> None:
        one = disk_host.instance()
        one.stored(1)
        lost = disk_host.disk.worker
        assert disk_host.disk.open_jobs(WRITE)
        disk_host.disk.lose()
        assert counts(clear(one)) == (0, 0, 1)
        disk_host.disk.exit(lost)
        assert counts(clear(one)) == (1, 0, 0)

    def test_what_it_could_not_read_lately_goes_as_well(self, disk_host: DiskHost) -> None:
        one, filler = disk_host.instance(), disk_host.instance("filler", fields=b"filler")
        disk_host.stored_on_disk(one, 1, 2)
        disk_host.evict_all(filler)
        one.lookup(1, 2)
        disk_host.disk.fail(disk_host.disk.open_jobs(READ)[0])
        assert one.lookup(1).states.tolist() == [0]
        assert counts(clear(one)) == (2, 0, 0)

    def test_keys_of_both_tiers_come_once(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1, 2, 3)
        found = disk_host.machine.keys(space_of(one))
        assert np.array_equal(np.unique(found, axis=0), keys(1, 2, 3))
        assert len(found) == 3
