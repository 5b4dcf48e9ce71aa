"""Hellos of several processes, as the front checks them and the core takes them in."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from kvtier.v1 import cache_pb2, types_pb2
from kvtier_kernels import BlockTable
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import PAGE_BYTES, SessionId
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import CoreLimits, EndSession
from kvtierd.rpc.errors import status_of, to_error
from kvtierd.rpc.hello import greeting_of, identity_of, namespace_fields
from kvtierd.rpc.peers import PeerProcess

from tests.fuzz.messages import edited
from tests.fuzz.source import Source
from tests.fuzz.target import Target
from tests.oracles.invariants import validate
from tests.unit.core.host import GEOMETRY, pages_of

HELLOS_MAX = 6
SALT = "s4lt§"
"""No other text of an input has this in it by chance."""
PEERS = [PeerProcess(1, uid, uid, -1, f"uid:{uid}", operator=False) for uid in (1000, 1001)]
REFUSAL_BYTES_MAX = 4_096


def hello() -> cache_pb2.Hello:
    """A sound one, of a process that is alone."""
    return cache_pb2.Hello(
        protocol_versions=[1],
        features=["index-page", "joint-lookup", "retention", "batches"],
        instance="engine",
        role=types_pb2.ROLE_SCHEDULER_AND_RANK,
        world_size=1,
        namespace=types_pb2.Namespace(
            model="m",
            kv_dtype="bfloat16",
            hash_scheme="test:1",
            hash_bytes=32,
            identity=[types_pb2.Setting(name=name, value="1") for name in ("a", "b")],
        ),
        client="fuzz 1",
        groups=[
            types_pb2.Group(
                group=index,
                kind=types_pb2.GROUP_KIND_FULL_ATTENTION,
                block_tokens=16,
                planes=[types_pb2.PlaneGeometry(fragment_bytes=2048, description="k")] * 2,
            )
            for index in range(2)
        ],
    )


def check_refusal(refusal: Refusal, secret: str = "") -> None:
    """A refusal says what is wrong, in bounded length, with a status on the wire, and never the secret."""
    assert refusal.message, refusal.reason
    status_of(refusal.reason)
    sent = to_error(refusal).SerializeToString()
    assert len(sent) <= REFUSAL_BYTES_MAX, len(sent)
    if secret:
        assert secret not in f"{refusal} {refusal.field} {refusal.value}", f"the salt is told: {refusal}"


def _hello_of(source: Source) -> cache_pb2.Hello | None:
    """Made from a sound one, or from bytes as they are; None for bytes that are no message."""
    message = hello()
    if source.one_in(16):
        try:
            message.ParseFromString(source.take(source.number(16)))
        except DecodeError:
            return None
    world = source.below(3)
    if world:
        message.world_size = world
        message.role = source.choice((types_pb2.ROLE_RANK, types_pb2.ROLE_SCHEDULER))
        message.rank = source.below(world)
        if message.role == types_pb2.ROLE_SCHEDULER:
            del message.groups[:]
    message.instance = source.choice(("engine", "other", "third"))
    edited(message, source)
    # A short salt may be part of other texts by chance.
    if salt := message.namespace.salt:
        message.namespace.salt = SALT + salt
    return message


def run(data: bytes) -> None:
    source = Source(data)
    machine = Machine(BlockTable(64, pages_of(GEOMETRY)), lambda: 0.0, CoreLimits(), GEOMETRY)
    attached = []
    for number in range(1, HELLOS_MAX):
        if number > 1 and source.is_empty:
            break
        peer = source.choice(PEERS)
        message = _hello_of(source)
        if message is None:
            continue
        secret = message.namespace.salt[: len(SALT) + 1] if message.namespace.salt else ""
        try:
            greeting = greeting_of(message, SessionId(number), peer)
            machine.handle(greeting.attach)
        except Refusal as refusal:
            check_refusal(refusal, secret)
        else:
            attached.append(SessionId(number))
            _check_greeting(message)
        validate(machine)
        if attached and source.one_in(4):
            _end(machine, attached.pop(source.below(len(attached))))
    for session in attached:
        _end(machine, session)
    core = machine.core
    assert not core.sessions, core.sessions
    assert not core.instances, core.instances


def _check_greeting(message: cache_pb2.Hello) -> None:
    """The canonical bytes of its namespace are bound to the message's settings, which can be read again."""
    again = [(setting.name, setting.value) for setting in message.namespace.identity]
    content = b"".join(
        len(text.encode()).to_bytes(4, "little") + text.encode() for pair in again for text in pair
    )
    assert list(identity_of(content)) == again
    assert not content or content in namespace_fields(message.namespace)


def _end(machine: Machine, session: SessionId) -> None:
    machine.handle(EndSession(session, "fuzz"))
    validate(machine)


assert PAGE_BYTES == 4096
TARGET = Target(
    run,
    (
        "kvtierd.rpc.hello",
        "kvtierd.rpc.heartbeats",
        "kvtierd.core.engines.hello",
        "kvtierd.core.engines.instances",
    ),
    bytes_max=400,
)
