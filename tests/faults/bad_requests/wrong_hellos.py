"""Hellos with one thing wrong, of a session that has been opened and not attached."""

import math
from random import Random
from typing import Any

from kvtier.v1 import cache_pb2, types_pb2
from kvtierd.core.errors import Reason
from kvtierd.rpc import hello as rules

from tests.faults.bad_requests.front import EXTENT_BYTES
from tests.faults.bad_requests.guest import Guest

LONG = "x" * (rules.TEXT_BYTES_MAX + 1)
TEXTS = ("kv_scales", "parallelism", "tenant", "salt", "adapter", "weights_revision", *rules._REQUIRED)


def wrong_hello(guest: Guest, token: bytes, chance: Random) -> tuple[cache_pb2.Hello, tuple[Reason, ...]]:
    """One that no daemon may accept while `guest` is attached, and why it is to be refused."""
    process = chance.choice(guest.kind.processes)
    hello: Any = guest.hello(process, token)
    kind = chance.randrange(6)
    if kind == 0:
        return hello, (Reason.SESSION_EXISTS,)
    if kind == 1:
        return hello, _unlike_the_others(hello, chance)
    hello.instance = f"somebody-{chance.randrange(1000)}"
    if kind == 2:
        return hello, _namespace(hello, chance)
    if kind == 3 and hello.groups:
        return hello, _groups(hello, chance)
    return hello, _itself(hello, chance)


def _unlike_the_others(hello: Any, chance: Random) -> tuple[Reason, ...]:
    """Of the same instance, and of another opinion about it."""
    match chance.randrange(3):
        case 0:
            hello.namespace.model += "2"
        case 1:
            hello.namespace.generation = chance.randrange(1, 2**64)
        case _:
            hello.role = types_pb2.ROLE_RANK
            hello.world_size += chance.randrange(1, 10)
            hello.rank = hello.world_size - 1
            if not hello.groups:
                hello.groups.add(kind=1, block_tokens=1).planes.add(fragment_bytes=1)
    return (Reason.FINGERPRINT_MISMATCH,)


def _itself(hello: Any, chance: Random) -> tuple[Reason, ...]:
    match chance.randrange(10):
        case 8:
            hello.prefill_tokens_per_s = chance.choice((-1.0, math.nan, math.inf, -math.inf))
            return (Reason.MALFORMED,)
        case 0:
            hello.ClearField("protocol_versions")
            hello.protocol_versions.extend([chance.randrange(2, 2**32) for _ in range(chance.randrange(4))])
            return (Reason.VERSION_UNSUPPORTED,)
        case 1:
            hello.role = chance.choice((0, 4, 77, -1, 2**31 - 1))
            return (Reason.ROLE,)
        case 2:
            hello.features.extend(["x"] * (rules.OFFERS_MAX + 1))
            return (Reason.MALFORMED,)
        case 3:
            hello.instance = chance.choice(("", LONG, "a\x1b[2Jb", "line\nline", "\u202e", "\x00"))
            return (Reason.MALFORMED,)
        case 4:
            hello.client = chance.choice((LONG, "a\x1b[2Jb", "\x7f"))
            return (Reason.MALFORMED,)
        case 5:
            hello.world_size = chance.choice((0, rules.WORLD_SIZE_MAX + 1, 2**32 - 1))
            return (Reason.MALFORMED,)
        case 6 if hello.role == types_pb2.ROLE_RANK:
            hello.rank = chance.choice((hello.world_size, 2**32 - 1))
            return (Reason.MALFORMED,)
        case 7:
            hello.role, hello.world_size = types_pb2.ROLE_SCHEDULER_AND_RANK, chance.randrange(2, 100)
            hello.rank = 0
            return (Reason.ROLE,)
        case _:
            hello.token = chance.randbytes(chance.randrange(20))
            return (Reason.UNKNOWN_TOKEN,)


def _namespace(hello: Any, chance: Random) -> tuple[Reason, ...]:
    namespace = hello.namespace
    match chance.randrange(4):
        case 0:
            hello.ClearField("namespace")
        case 1:
            namespace.hash_bytes = chance.choice((0, 7, 33, 2**32 - 1))
        case 2:
            setattr(namespace, chance.choice(rules._REQUIRED), "")
        case _:
            setattr(namespace, chance.choice(TEXTS), LONG)
    return (Reason.NAMESPACE_INVALID,)


def _groups(hello: Any, chance: Random) -> tuple[Reason, ...]:
    group = chance.choice(hello.groups)
    plane = chance.choice(group.planes)
    match chance.randrange(11):
        case 0:
            hello.ClearField("groups")
        case 1:
            hello.groups.extend([group] * rules.GROUPS_MAX)
        case 2:
            group.group += chance.randrange(1, 2**31)
        case 3:
            group.kind = chance.choice((0, 9, -1))
        case 4:
            group.block_tokens = 0
        case 5:
            group.window_tokens = chance.randrange(1, 2**32)
        case 6:
            group.kind = types_pb2.GROUP_KIND_SLIDING_WINDOW
        case 7:
            group.ClearField("planes")
        case 8:
            plane.fragment_bytes = 0
        case 9:
            plane.description = LONG
        case _:
            plane.fragment_bytes = chance.choice((EXTENT_BYTES, 2**32, 2**63, 2**64 - 1))
            return (Reason.SLOT_TOO_LARGE,)
    return (Reason.LAYOUT_INVALID,)
