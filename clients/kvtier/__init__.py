"""The light kvtier client. It needs grpcio, protobuf, numpy and the native core, but no daemon code or torch.

    import hashlib

    from kvtier import Client, Group, Namespace, Plane, SharedBuffer

    block_bytes, num_blocks = 65_536, 64
    with SharedBuffer.create(num_blocks * block_bytes) as memory:  # the engine's KV cache
        group = Group(
            block_tokens=16,
            num_blocks=num_blocks,
            planes=(Plane(fragment_bytes=block_bytes, base_offset=0, block_stride_bytes=block_bytes),),
        )
        namespace = Namespace(model="demo", kv_dtype="bfloat16", hash_scheme="sha256")
        with Client(instance="demo", namespace=namespace, groups=[group], memory=memory) as client:
            if not client.wait_ready(timeout_s=30):
                raise SystemExit(client.status.why)
            # Three blocks are computed and stored. A hash covers its block and all blocks before it.
            memory.array[: 3 * block_bytes] = 7
            hashes = [hashlib.sha256(prefix).digest() for prefix in (b"one", b"one two", b"one two three")]
            stored = client.store(hashes, [0, 1, 2]).wait(timeout_s=30)
            # Later it finds them by their hashes, and loads them to other places.
            with client.lookup(hashes, lease=True, timeout_s=30) as hit:
                if hit.lease:
                    loaded = client.load(hit, [10, 11, 12][: hit.hits]).wait(timeout_s=30)
                    same = bool((memory.array[10 * block_bytes : 13 * block_bytes] == 7).all())
                    print(stored.done, hit.hits, loaded.done, same)  # True 3 True True

The example needs a running `kvtierd`, at the default socket or at the one that KVTIER_SOCKET names. It prints
what its last comment says.

A lease holds as many blocks as the pool has room to hold. Look up what it left out of a long prefix
(`hit.unleased`) again when the load has ended: this way a prefix of any size can be loaded, part by part.

`kvtier.aio.Client` is the same for asyncio. An engine of several processes uses one client with
`role=Role.SCHEDULER`, which looks up and submits, and one with `role=Role.RANK` per rank. A rank's client
shares memory, rings doorbells, and tells how the parts that the scheduler has named to it stand
(`Transfer.part`).

Memory on a GPU is shared in the same way with `kvtier.cuda`, which is a module of its own to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.client import Client, LookupCall, Transfer
    from kvtier.connection.address import default_socket
    from kvtier.errors import KvtierError, NotExportableError, Reason
    from kvtier.layout import Group, GroupKind, Namespace, Plane
    from kvtier.lookups import HIT, MISS, PENDING, GroupLookup, Lease, Lookup
    from kvtier.memory import DeviceShareable, Shareable, SharedBuffer
    from kvtier.queries import BlockIds, Chain, GroupQuery, Hashes, LookupMode
    from kvtier.retention import Retention
    from kvtier.spec import ClientOptions, Role
    from kvtier.status import ClientState, ClientStatus, Counters
    from kvtier.transfers import Outcome, StoreResult, TransferState
    from kvtier.words import Direction, Doorbell, PartRef, PartState

__all__ = [
    "HIT",
    "MISS",
    "PENDING",
    "BlockIds",
    "Chain",
    "Client",
    "ClientOptions",
    "ClientState",
    "ClientStatus",
    "Counters",
    "DeviceShareable",
    "Direction",
    "Doorbell",
    "Group",
    "GroupKind",
    "GroupLookup",
    "GroupQuery",
    "Hashes",
    "KvtierError",
    "Lease",
    "Lookup",
    "LookupCall",
    "LookupMode",
    "Namespace",
    "NotExportableError",
    "Outcome",
    "PartRef",
    "PartState",
    "Plane",
    "Reason",
    "Retention",
    "Role",
    "Shareable",
    "SharedBuffer",
    "StoreResult",
    "Transfer",
    "TransferState",
    "default_socket",
]

_HOMES = {
    "kvtier.client": (
        "Client",
        "LookupCall",
        "Transfer",
    ),
    "kvtier.connection.address": ("default_socket",),
    "kvtier.errors": (
        "KvtierError",
        "NotExportableError",
        "Reason",
    ),
    "kvtier.layout": (
        "Group",
        "GroupKind",
        "Namespace",
        "Plane",
    ),
    "kvtier.lookups": (
        "HIT",
        "MISS",
        "PENDING",
        "GroupLookup",
        "Lease",
        "Lookup",
    ),
    "kvtier.memory": (
        "DeviceShareable",
        "Shareable",
        "SharedBuffer",
    ),
    "kvtier.queries": (
        "BlockIds",
        "Chain",
        "GroupQuery",
        "Hashes",
        "LookupMode",
    ),
    "kvtier.retention": ("Retention",),
    "kvtier.spec": (
        "ClientOptions",
        "Role",
    ),
    "kvtier.status": (
        "ClientState",
        "ClientStatus",
        "Counters",
    ),
    "kvtier.transfers": (
        "Outcome",
        "StoreResult",
        "TransferState",
    ),
    "kvtier.words": (
        "Direction",
        "Doorbell",
        "PartRef",
        "PartState",
    ),
}
"""Which module each name comes from. They are imported when they are first asked for, because whoever needs
the messages alone (`kvtier.v1`) should not pay for the client."""
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
