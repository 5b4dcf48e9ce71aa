"""One tenant cannot use up what another needs: sessions, leases and room."""

from kvtier.v1 import types_pb2

from tests.integration.daemon.raw import RawSession, hashes
from tests.security.conftest import As, Start
from tests.security.people import ATTACKER, VICTIM
from tests.support.process import Daemon

POOL = {"pool__size": "10MiB", "pool__extent_size": "1MiB"}
"""8 MiB for blocks; each has 12 KiB."""
IDS = list(range(32))


def attached(session: RawSession, name: str) -> bool:
    """Whether there was a session left."""
    try:
        session.attach(instance=name)
    except (ConnectionError, AssertionError):
        return False
    return True


def test_sessions_are_left_for_others(start: Start, connect: As) -> None:
    start(server__sessions_max=32)
    opened = 0
    while attached(connect(ATTACKER), f"attacker {opened}"):
        opened += 1
    assert 24 <= opened < 32, "a tenant alone has most of them"
    answer, _ = connect(ATTACKER).side.receive()
    assert answer.error.reason == types_pb2.REASON_QUEUE_FULL
    assert f"uid:{ATTACKER}" in answer.error.message
    for number in range(2):
        connect(VICTIM).ready(instance=f"victim {number}")


def flood(session: RawSession, seed: int) -> None:
    """Stores so many blocks that they would fill the pool twice."""
    for number in range(44):
        session.store(hashes(32, seed=seed + number), IDS)


def test_a_busy_tenant_does_not_evict_anothers_blocks(start: Start, connect: As) -> None:
    daemon = start(**POOL)
    keys = hashes(32, seed=7)
    victim = connect(VICTIM).ready()
    victim.fill(1)
    right = [victim.block(number) for number in IDS]
    assert victim.store(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    attackers = [connect(ATTACKER).ready(instance=f"attacker {number}") for number in range(4)]
    for number, each in enumerate(attackers):
        flood(each, 1_000 * (number + 1))
    assert daemon.status().counters.evicted_blocks > 1_000, "the control: the pool was full all the time"
    victim.fill(2)
    assert victim.load(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    assert [victim.block(number) for number in IDS] == right


def test_a_latecomer_gets_its_part(start: Start, connect: As) -> None:
    start(**POOL)
    attacker = connect(ATTACKER).ready()
    flood(attacker, 1_000)
    victim = connect(VICTIM).ready()
    for number in range(8):
        assert victim.store(hashes(32, seed=50 + number), IDS).state == types_pb2.TRANSFER_STATE_DONE
        flood(attacker, 10_000 + 1_000 * number)
    for number in range(8):
        found = victim.lookup(hashes(32, seed=50 + number)).answers[0].hits
        assert found == 32, f"batch {number}"


def test_a_limit_is_kept(start: Start, connect: As) -> None:
    daemon = start(**POOL, server__tenant_shares=f"uid:{ATTACKER}=0-0.25")
    flood(connect(ATTACKER).ready(), 1_000)
    assert 0 < daemon.status().pool.used_bytes <= 2 << 20


def test_leases_of_many_engines_leave_some_for_others(daemon: Daemon, connect: As) -> None:
    first = connect(ATTACKER).ready()
    for number in range(200):
        first.store(hashes(32, seed=number), IDS)
    attackers = [first, *(connect(ATTACKER).ready(instance=f"attacker {number}") for number in range(5))]
    victim = connect(VICTIM).ready()
    keys = hashes(32, seed=9_999)
    victim.store(keys, IDS)
    leased = 0
    for number in range(200):
        found = attackers[number % 6].lookup(hashes(32, seed=number), lease=True)
        leased += found.answers[0].hits if found.lease_id else 0
    assert leased * 12_288 > daemon.status().pool.capacity_bytes / 3, "the control: they lease all they can"
    assert victim.lookup(keys, lease=True).answers[0].hits == 32
