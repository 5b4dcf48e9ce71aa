"""What can be seen of a daemon's processes, and of what it refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvtier.v1 import admin_pb2

from tests.integration.daemon.raw import Refused
from tests.support.process import Daemon


def maps_of_clients(worker_pid: int) -> int:
    """Mappings of clients' memory in a copy worker."""
    return Path(f"/proc/{worker_pid}/maps").read_text().count("/memfd:kvtier-test-client")


def picture(daemon: Daemon) -> admin_pb2.StatusResponse:
    """Everything Status tells, but for the passing of time and counts of refusals."""
    status = daemon.status()
    status.ClearField("refused_imports")
    status.ClearField("uptime_s")
    status.integrity.ClearField("sampled_slots")
    status.integrity.ClearField("sampled_bytes")
    for worker in status.workers:
        worker.ClearField("registered_bytes")  # the pool is registered bit by bit
    for instance in status.instances:
        for session in instance.sessions:
            session.ClearField("attached_s")
    return status


@contextmanager
def nothing_changes(daemon: Daemon) -> Iterator[None]:
    before = picture(daemon)
    yield
    assert picture(daemon) == before


@contextmanager
def refusal(reason: str, field: str | None = None) -> Iterator[None]:
    with pytest.raises(Refused) as refused:
        yield
    assert refused.value.reason == reason, refused.value
    assert refused.value.error.message
    if field is not None:
        assert refused.value.error.field == field
