"""The light kvtier client: grpcio, protobuf, numpy and the native core; no daemon code, no torch.

    with SharedBuffer.create(num_blocks * block_bytes) as memory:
        group = Group(
            block_tokens=16,
            num_blocks=num_blocks,
            planes=(Plane(fragment_bytes=block_bytes, base_offset=0, block_stride_bytes=block_bytes),),
        )
        namespace = Namespace(model="demo", kv_dtype="bfloat16", hash_scheme="sha256")
        with Client(instance="demo", namespace=namespace, groups=[group], memory=memory) as client:
            client.wait_ready(timeout_s=5)
            client.store(hashes, block_ids).wait(timeout_s=5)
            with client.lookup(hashes, lease=True) as hit:
                if hit.lease:
                    outcome = client.load(hit, block_ids[: hit.hits]).wait(timeout_s=5)

`kvtier.aio.Client` is the same for asyncio. An engine of several processes uses one client with
`role=Role.SCHEDULER`, which looks up and submits, and one with `role=Role.RANK` per rank, which shares
memory, rings doorbells, and asks what has become of the parts (`Transfer.part`) that the scheduler told it
about.

Memory on a GPU is shared the same way: see `kvtier.cuda`, which is imported by those who use it.
"""

from kvtier.address import default_socket
from kvtier.client import Client, LookupCall, Transfer
from kvtier.errors import KvtierError, NotExportableError, Reason
from kvtier.joint import GroupQuery
from kvtier.layout import Group, GroupKind, Namespace, Plane
from kvtier.lookups import HIT, MISS, PENDING, BlockIds, Hashes, Lease, Lookup, LookupMode
from kvtier.memory import DeviceShareable, Shareable
from kvtier.options import ClientOptions
from kvtier.retention import Retention
from kvtier.session import Doorbell
from kvtier.shared import SharedBuffer
from kvtier.spec import Role
from kvtier.status import ClientState, ClientStatus, Counters
from kvtier.transfers import Outcome, StoreResult, TransferState
from kvtier.words import Direction, PartRef, PartState

__all__ = [
    "HIT",
    "MISS",
    "PENDING",
    "BlockIds",
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
