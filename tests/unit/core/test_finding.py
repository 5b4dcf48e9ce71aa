"""Where blocks are, for those who load nothing: the answer holds, promotes and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SpaceId
from kvtierd.core.maintenance.finding import NOWHERE, ON_DISK, ON_HOST
from kvtierd.core.stimuli import Drain, Resume

from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Host, Instance, keys


def space_of(
    host: Host, instance: Instance, group: int = 0, **changed: Any
) -> tuple[SpaceId, NamespaceAbout]:
    [entity] = host.machine.core.instances.values()
    assert entity.digest is not None
    asked: dict[str, Any] = {
        "namespace": entity.digest.hex(),
        "group": group,
        "tenant": entity.owner.tenant,
    } | changed
    return host.machine.space_of(**asked)


def places(host: Host, instance: Instance, *numbers: int) -> list[int]:
    """What is found. Everything else must be as it was."""
    space, _ = space_of(host, instance)
    before = host.machine.core.blocks.table.dump(), host.machine.status()
    found = host.machine.find(space, keys(*numbers))
    host.validate()
    after = host.machine.core.blocks.table.dump(), host.machine.status()
    assert all(np.array_equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1] == after[1]
    return list(found.tolist())


def test_each_block_is_where_it_can_be_read(disk_host: DiskHost) -> None:
    one = disk_host.instance()
    disk_host.stored_on_disk(one, 1, 2)
    disk_host.evict_all(one)
    one.stored(3)
    running = one.store(4)
    assert places(disk_host, one, 1, 3, 2, 4, 5) == [ON_DISK, ON_HOST, ON_DISK, NOWHERE, NOWHERE]
    assert disk_host.disk.jobs == [], "nothing is promoted"
    running.finish()
    assert places(disk_host, one, 4) == [ON_HOST]
    assert places(disk_host, one) == []
    disk_host.disk.finish_all()
    disk_host.disk.pause()
    assert places(disk_host, one, 1, 3) == [NOWHERE, ON_HOST]


def test_what_both_have_is_on_the_host(disk_host: DiskHost) -> None:
    one = disk_host.instance()
    disk_host.stored_on_disk(one, 1)
    assert disk_host.disk.holds(one, 1) == [1], "the control"
    assert places(disk_host, one, 1) == [ON_HOST]


def test_while_it_drains_nothing_is_anywhere(host: Host) -> None:
    one = host.instance()
    one.stored(1)
    host.do(Drain())
    assert places(host, one, 1) == [NOWHERE]
    host.do(Resume())
    assert places(host, one, 1) == [ON_HOST]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tenant": "somebody else"}, Reason.NAMESPACE_INVALID),
        ({"namespace": "00" * 16}, Reason.NAMESPACE_INVALID),
        ({"namespace": "nonsense"}, Reason.NAMESPACE_INVALID),
        ({"namespace": ""}, Reason.NAMESPACE_INVALID),
        ({"group": 1}, Reason.UNKNOWN_GROUP),
    ],
)
def test_only_ones_own_namespaces_are_there(host: Host, changed: dict[str, Any], reason: Reason) -> None:
    one = host.instance()
    assert space_of(host, one)[1].hash_bytes == 32, "the control"
    with pytest.raises(Refusal) as refused:
        space_of(host, one, **changed)
    assert refused.value.reason is reason
    if "tenant" in changed:
        assert refused.value.value in str(refused.value)
        assert "nearest" not in str(refused.value), "what others have is not named"
