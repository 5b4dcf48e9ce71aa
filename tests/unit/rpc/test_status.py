"""A status of many instances is made in parts, and whole."""

import asyncio
import dataclasses

from kvtierd.rpc.authority import Viewer
from kvtierd.rpc.status import AboutDaemon, status_response

from tests.unit.operation.snapshots import busy_snapshot

INSTANCES = 30


async def test_others_run_between_two_instances() -> None:
    busy = busy_snapshot()
    [one] = busy.core.instances
    many = tuple(dataclasses.replace(one, name=f"engine-{number}") for number in range(INSTANCES))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    about = AboutDaemon("1.2.3", 42, "/run/k.sock", "")
    snapshot = dataclasses.replace(busy, core=dataclasses.replace(busy.core, instances=many))
    answer = await status_response(about, snapshot, Viewer("a test", None))
    running.cancel()
    assert turns >= INSTANCES
    assert [each.instance for each in answer.instances] == [each.name for each in many]
    assert answer.instances[0].sessions[0].role == busy.sessions[one.sessions[0]].role
