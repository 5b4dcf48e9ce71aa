"""An engine of one's own around a PyTorch model: its KV cache is stored in kvtierd and found again.

Start a daemon with `kvtierd serve`, then run this program twice. The first run computes the prompt and stores
its blocks; the second one loads them, computes only what is left, and answers the same, bit for bit.
"""

import hashlib
import sys
import time

import torch
from kvtier import Client, Namespace
from kvtier.torch import SharedTensors

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 4, 4, 32, 512
WIDTH = HEADS * HEAD_DIM
BLOCK_TOKENS, NUM_BLOCKS = 16, 64
PROMPT = [(7 * i * i + 11 * i) % VOCABULARY for i in range(30 * BLOCK_TOKENS + 5)]


class Model(torch.nn.Module):
    """A transformer without training: four layers of causal attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.attention = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.output = torch.nn.Linear(WIDTH, VOCABULARY)
        self.mixing = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    @torch.no_grad()
    def forward(self, token, position, cache, blocks):
        """Computes one token, whose keys and values it adds to the cache. Returns the likeliest next one."""
        block, place = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        hidden = self.embedding(torch.tensor(token))
        for layer in range(LAYERS):
            query, key, value = self.attention[layer](hidden).view(3, HEADS, HEAD_DIM)
            stored = cache[f"layer {layer}"]  # (blocks, 2, tokens, heads, values)
            stored[block, 0, place], stored[block, 1, place] = key, value
            used = stored[blocks[: position // BLOCK_TOKENS + 1]]
            keys, values = (used[:, half].flatten(0, 1)[: position + 1] for half in (0, 1))
            weights = torch.einsum("hd,thd->ht", query, keys).div(HEAD_DIM**0.5).softmax(-1)
            mixed = torch.einsum("ht,thd->hd", weights, values).flatten()
            hidden = torch.nn.functional.layer_norm(hidden + self.mixing[layer](mixed), (WIDTH,))
        return int(self.output(hidden).argmax())


def block_hashes(tokens):
    """One hash for each full block. It covers the block's tokens and, through its parent, all before them."""
    hashes, parent = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = torch.tensor(tokens[start : start + BLOCK_TOKENS], dtype=torch.int32).numpy().tobytes()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)
    return hashes


def main():
    model, blocks = Model(), list(range(NUM_BLOCKS))
    hashes = block_hashes(PROMPT[:-1])  # the last token is always computed: its output is the answer
    shape = (NUM_BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
    shapes = {f"layer {layer}": shape for layer in range(LAYERS)}
    namespace = Namespace(model="examples/torch_engine", kv_dtype="float32", hash_scheme="sha256 of int32")
    with (
        SharedTensors.allocate(shapes, torch.float32, block_tokens=BLOCK_TOKENS) as cache,
        Client(instance="torch", namespace=namespace, groups=cache.groups, memory=cache.memory) as client,
    ):
        if not client.wait_ready(timeout_s=30):
            sys.exit(f"no daemon: {client.status.why}")
        begun_s, loaded = time.perf_counter(), 0
        with client.lookup(hashes, lease=True, timeout_s=5) as found:
            if found.lease and client.load(found, blocks[: found.hits]).wait(timeout_s=30).done:
                loaded = found.hits
        for position in range(loaded * BLOCK_TOKENS, len(PROMPT)):
            token = model(PROMPT[position], position, cache, blocks)
        first_s, answer = time.perf_counter() - begun_s, [token]
        for position in range(len(PROMPT), len(PROMPT) + 8):
            answer.append(model(answer[-1], position, cache, blocks))
        if loaded < len(hashes):
            client.store(hashes[loaded:], blocks[loaded : len(hashes)]).wait(timeout_s=30)
        print(f"loaded {loaded} of {len(hashes)} blocks, first token after {first_s:.3f} s: {answer}")


if __name__ == "__main__":
    main()
