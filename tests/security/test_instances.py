"""An instance belongs to the user who formed it, and to the secret that its processes share."""

import grpc
import pytest
from kvtier.v1 import types_pb2

from tests.integration.daemon.raw import RawSession, Refused, hashes
from tests.security.conftest import As, Start
from tests.security.people import ATTACKER, VICTIM
from tests.support.process import DEADLINE_S, Daemon

STRANGERS = pytest.mark.parametrize(
    ("uid", "secret"), [(ATTACKER, b""), (ATTACKER, b"secret"), (VICTIM, b""), (VICTIM, b"guess")]
)
"""Other users, even if they know the secret, and processes of the same user who do not know it."""


def rank(session: RawSession, **changes: object) -> RawSession:
    return session.ready(**({"role": types_pb2.ROLE_RANK, "secret": b"secret"} | changes))


def scheduler(session: RawSession, **changes: object) -> RawSession:
    session.attach(**({"role": types_pb2.ROLE_SCHEDULER, "groups": [], "secret": b"secret"} | changes))
    return session


@STRANGERS
def test_a_stranger_gets_no_seat_of_a_live_instance(
    daemon: Daemon, connect: As, uid: int, secret: bytes
) -> None:
    victim = rank(connect(VICTIM))
    victim.fill(1)
    before = victim.memory.copy()
    stranger = connect(uid)
    welcome = stranger.attach(role=types_pb2.ROLE_SCHEDULER, groups=[], secret=secret)
    assert welcome.epoch != victim.epoch, "it has formed an instance of its own"
    assert list(welcome.instance.missing_ranks) == [0]
    with pytest.raises(Refused) as refused:
        stranger.store(hashes(1), [0])
    assert refused.value.reason == "INSTANCE_INCOMPLETE"
    theirs = stranger.store_request(hashes(1), [0])
    theirs.session.CopyFrom(stranger.ref(epoch=victim.epoch))
    with pytest.raises(grpc.RpcError, match="WRONG_EPOCH"):
        stranger.stub.Store(theirs, timeout=DEADLINE_S)
    assert scheduler(connect(VICTIM)).epoch == victim.epoch, "its own scheduler finds its seat free"
    assert (victim.memory == before).all()


@STRANGERS
@pytest.mark.parametrize("how", ["kill", "drain"])
def test_a_seat_is_taken_again_after_a_restart_only_by_its_own(
    start: Start, connect: As, uid: int, secret: bytes, how: str
) -> None:
    first = start()
    victim = rank(connect(VICTIM))
    scheduler(connect(VICTIM))
    if how == "kill":
        first.kill()
    else:
        assert first.stop() == 0
    victim.close()
    start()
    victim = rank(connect(VICTIM))
    victim.fill(1)
    stranger = scheduler(connect(uid), secret=secret)
    assert stranger.epoch != victim.epoch
    own = scheduler(connect(VICTIM))
    assert own.epoch == victim.epoch
    stored = own.store(hashes(4), [0, 1, 2, 3])
    assert stored.state == types_pb2.TRANSFER_STATE_DONE


@STRANGERS
def test_a_name_cannot_be_squatted(daemon: Daemon, connect: As, uid: int, secret: bytes) -> None:
    connect(uid).ready(secret=secret)
    victim = connect(VICTIM).ready(secret=b"secret")
    victim.fill(1)
    assert victim.store(hashes(4), [0, 1, 2, 3]).state == types_pb2.TRANSFER_STATE_DONE


def test_processes_of_one_owner_meet(daemon: Daemon, connect: As) -> None:
    """The control: without it, the tests above could pass because nobody ever meets anybody."""
    one = rank(connect(VICTIM))
    assert scheduler(connect(VICTIM)).epoch == one.epoch
    with pytest.raises(Refused) as refused:
        scheduler(connect(VICTIM))
    assert refused.value.reason == "SESSION_EXISTS"


def test_a_secret_is_never_told(daemon: Daemon, connect: As) -> None:
    connect(VICTIM).ready(secret=b"a-very-special-secret")
    assert "a-very-special-secret" not in f"{daemon.status()}{daemon.log()}"
