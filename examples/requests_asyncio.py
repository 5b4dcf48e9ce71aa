"""Several requests share one prefix: the first one stores it, and the others load it at the same time.

Start a daemon with `kvtierd serve`, then run this program. It uses `kvtier.aio.Client`, which has the same
calls as the blocking client: those that wait are coroutines, and the others return at once.
"""

import asyncio
import hashlib
import os
import sys

import numpy as np
from kvtier import Group, Namespace, Plane, SharedBuffer
from kvtier.aio import Client

BLOCK_BYTES = 256 * 1024
BLOCKS_OF_PREFIX = 4
REQUESTS = 8
NUM_BLOCKS = BLOCKS_OF_PREFIX * (REQUESTS + 1)
# A new prefix in each run, so that the first request always has something to store.
PREFIX = [hashlib.sha256(os.urandom(32)).digest() for _ in range(BLOCKS_OF_PREFIX)]


def blocks_of(request):
    """The blocks of the KV cache that belong to one request."""
    return list(range(request * BLOCKS_OF_PREFIX, (request + 1) * BLOCKS_OF_PREFIX))


async def serve(client, request):
    """Loads the prefix into this request's blocks; returns how many blocks it got."""
    with await client.lookup(PREFIX, lease=True, timeout_s=5) as found:
        if found.lease is None:
            return 0
        load = client.load(found, blocks_of(request)[: found.hits])
        outcome = await load.wait(timeout_s=30)
        return found.hits if outcome.done else 0


async def main():
    with SharedBuffer.create(NUM_BLOCKS * BLOCK_BYTES) as memory:
        cache = memory.array.reshape(NUM_BLOCKS, BLOCK_BYTES)
        plane = Plane(fragment_bytes=BLOCK_BYTES, base_offset=0, block_stride_bytes=BLOCK_BYTES)
        group = Group(block_tokens=16, num_blocks=NUM_BLOCKS, planes=(plane,))
        namespace = Namespace(model="examples/requests_asyncio", kv_dtype="uint8", hash_scheme="sha256")
        client = Client(instance="example-asyncio", namespace=namespace, groups=[group], memory=memory)
        async with client:
            if not await client.wait_ready(timeout_s=30):
                sys.exit(f"no daemon: {client.status.why}")
            # Request 0 computes the prefix and stores it.
            cache[blocks_of(0)] = np.arange(1, BLOCKS_OF_PREFIX + 1, dtype=np.uint8)[:, None]
            stored = await client.store(PREFIX, blocks_of(0)).wait(timeout_s=30)
            print(f"request 0 stored {sum(stored.succeeded)} blocks")
            # The others load it, all at once. Each has a lease of its own on the same blocks.
            loaded = await asyncio.gather(*(serve(client, request) for request in range(1, REQUESTS + 1)))
            same = all((cache[blocks_of(r)] == cache[blocks_of(0)]).all() for r in range(1, REQUESTS + 1))
            print(f"{REQUESTS} requests loaded {sum(loaded)} blocks, every byte right: {same}")
        del cache


if __name__ == "__main__":
    asyncio.run(main())
