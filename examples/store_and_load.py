"""A prompt is computed once: whoever computes it stores its KV blocks, and later runs load them.

Start a daemon with `kvtierd serve`, then run this program twice. The first run computes every block, the
second one loads them all. Restart the daemon in between (even with `kill -9`), and the second run still does.

"Computing" a block means filling it with numbers that follow from its tokens, so that each loaded block can
be compared with what computing it would have given.
"""

import hashlib
import sys

import numpy as np
from kvtier import Client, Group, Namespace, Plane, SharedBuffer

BLOCK_TOKENS = 16
BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 32
PROMPT = [7 * position % 1000 for position in range(8 * BLOCK_TOKENS)]


def block_hashes(tokens):
    """One hash for each full block. It covers the block's tokens and, through its parent, all before them."""
    hashes, parent = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], np.uint32)
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        hashes.append(parent)
    return hashes


def compute(block_hash):
    """Stands for the model: the bytes of a block follow from its tokens."""
    return np.resize(np.frombuffer(block_hash, np.uint8), BLOCK_BYTES)


def main():
    hashes = block_hashes(PROMPT)
    # The "KV cache": memory that this process and the daemon's copy worker both map. Block i of the only
    # plane begins i * BLOCK_BYTES behind its start.
    with SharedBuffer.create(NUM_BLOCKS * BLOCK_BYTES) as memory:
        cache = memory.array.reshape(NUM_BLOCKS, BLOCK_BYTES)
        plane = Plane(fragment_bytes=BLOCK_BYTES, base_offset=0, block_stride_bytes=BLOCK_BYTES)
        group = Group(block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS, planes=(plane,))
        # Only clients with an equal namespace share blocks.
        namespace = Namespace(model="examples/store_and_load", kv_dtype="uint8", hash_scheme="sha256")
        with Client(instance="example", namespace=namespace, groups=[group], memory=memory) as client:
            if not client.wait_ready(timeout_s=30):
                sys.exit(f"no daemon: {client.status.why}")
            # The lease keeps the blocks that were found in place until they are loaded.
            with client.lookup(hashes, lease=True, timeout_s=5) as found:
                loaded = 0
                if found.lease:
                    outcome = client.load(found, list(range(found.hits))).wait(timeout_s=30)
                    loaded = found.hits if outcome.done else 0
            # A miss, a failed load and an absent daemon all mean the same: compute.
            for number in range(loaded, len(hashes)):
                cache[number] = compute(hashes[number])
            missing = list(range(loaded, len(hashes)))
            if missing:
                client.store([hashes[number] for number in missing], missing).wait(timeout_s=30)
            right = all((cache[number] == compute(each)).all() for number, each in enumerate(hashes))
            print(f"computed {len(missing)} blocks, loaded {loaded}, every byte right: {right}")
        del cache


if __name__ == "__main__":
    main()
