"""The keyword arguments of both clients, for programs that put them together before they make a client."""

import os
from collections.abc import Callable, Sequence
from typing import Required, TypedDict

from kvtier.layout import Group, Namespace, Settings
from kvtier.memory import Memory
from kvtier.spec import Role
from kvtier.status import ClientStatus


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of `kvtier.Client` and `kvtier.aio.Client`, to be passed as `Client(**options)`.
    `help(kvtier.Client)` says what each of them means, and its default."""

    instance: Required[str]
    namespace: Required[Namespace]
    role: Role
    rank: int
    world_size: int
    groups: Sequence[Group]
    memory: Memory | None
    socket: str | os.PathLike[str] | None
    doorbells: int
    parts: int
    program: str
    prefill_tokens_per_s: float
    configuration: Settings
    on_ready: Callable[[ClientStatus], None] | None
