"""Blocks are shared within a tenant, and a tenant is what the operator or the kernel says, not what an engine
claims."""

from kvtier.v1 import types_pb2

from tests.integration.daemon.raw import RawSession, hashes
from tests.security.conftest import As, Start
from tests.security.people import ATTACKER, VICTIM
from tests.support.process import Daemon

BLOCKS = 16
IDS = list(range(BLOCKS))


def hits(session: RawSession, keys: bytes) -> int:
    return session.lookup(keys, host_only=True).answers[0].hits


def stored(session: RawSession, keys: bytes, seed: int) -> list[bytes]:
    session.fill(seed)
    assert session.store(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    return [session.block(number) for number in IDS]


def test_another_users_blocks_are_neither_found_nor_loaded(daemon: Daemon, connect: As) -> None:
    keys = hashes(BLOCKS)
    victim, attacker = connect(VICTIM).ready(), connect(ATTACKER).ready()
    stored(victim, keys, 1)
    assert hits(victim, keys) == BLOCKS
    assert hits(attacker, keys) == 0
    namespace = types_pb2.Namespace(
        model="tiny", kv_dtype="uint8", hash_scheme="test:1", hash_bytes=32, tenant=f"uid:{VICTIM}"
    )
    liar = connect(ATTACKER).ready(namespace=namespace, instance="liar")
    assert hits(liar, keys) == 0, "what an engine claims is no more than a part of its own tenant"


def test_another_users_blocks_are_never_served_for_ones_own(daemon: Daemon, connect: As) -> None:
    keys = hashes(BLOCKS)
    attacker, victim = connect(ATTACKER).ready(), connect(VICTIM).ready()
    poison = stored(attacker, keys, 666)
    assert hits(victim, keys) == 0
    right = stored(victim, keys, 1)
    assert right != poison
    victim.fill(9)
    assert victim.load(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    assert [victim.block(number) for number in IDS] == right
    attacker.fill(9)
    assert attacker.load(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    assert [attacker.block(number) for number in IDS] == poison, "the control: both are there"


def test_engines_of_one_user_share_without_configuration(daemon: Daemon, connect: As) -> None:
    keys = hashes(BLOCKS)
    one, other = connect(VICTIM).ready(instance="one"), connect(VICTIM).ready(instance="other", secret=b"s")
    right = stored(one, keys, 1)
    assert other.load(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    assert [other.block(number) for number in IDS] == right


def test_tenants_outlive_the_daemon(start: Start, connect: As) -> None:
    keys = hashes(BLOCKS)
    first = start()
    session = connect(VICTIM).ready()
    stored(session, keys, 1)
    session.close()
    first.kill()
    start()
    assert hits(connect(VICTIM).ready(), keys) == BLOCKS
    assert hits(connect(ATTACKER).ready(), keys) == 0


def test_an_operator_lets_users_share_on_purpose(start: Start, connect: As) -> None:
    keys = hashes(BLOCKS)
    start(server__tenants=f"uid:{VICTIM}-{ATTACKER}=research, *=others")
    right = stored(connect(VICTIM).ready(), keys, 1)
    other = connect(ATTACKER).ready()
    assert other.load(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE
    assert [other.block(number) for number in IDS] == right
    assert hits(connect(0).ready(), keys) == 0, "root is of the others"


def test_a_group_can_be_a_tenant(start: Start, connect: As) -> None:
    start(server__tenants="group:daemon=members")
    keys = hashes(BLOCKS)
    stored(connect(VICTIM).ready(), keys, 1)
    assert hits(connect(ATTACKER).ready(), keys) == BLOCKS
