"""Writes a small random Llama that any engine can serve: the model of the tests and of the demo.

The weights are random but the model is not degenerate: its next token depends on the whole prefix, so a wrong
KV block shows in the output (an engine's own "dummy" weights loop on two tokens and hide it).
Needs only numpy and safetensors.

    python -m tools.tiny_llama DIRECTORY [--preset tiny|demo] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

# Raised when the same preset and seed begin to mean other weights; part of what `ensure` compares.
FORMAT = 1

# Gain of every projection relative to 1/sqrt(fan_in). At 1.9 attention is peaked enough for a token far
# back to change the next one, and activations still stay finite in bfloat16.
WEIGHT_GAIN = 1.9


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. `heads * head_dim` need not equal `hidden`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    max_positions: int
    kv_heads: int = 2
    head_dim: int = 64

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of KV cache that a token takes at 16 bits a value, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


PRESETS = {
    # Tests: loads in no time; 6 MB.
    "tiny": Shape(hidden=256, intermediate=512, layers=4, heads=4, vocab=1024, max_positions=4096),
    # The demo: a prefill of about 2,000 tokens takes long enough on two cores to be felt; 140 MB.
    "demo": Shape(hidden=768, intermediate=2304, layers=10, heads=12, vocab=1024, max_positions=8192),
}


def config_of(shape: Shape) -> dict[str, object]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """Yields name, shape and standard deviation of each tensor; None stands for ones (a norm's weight)."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def projection(name: str, rows: int, columns: int) -> tuple[str, tuple[int, ...], float]:
        return name, (rows, columns), WEIGHT_GAIN / math.sqrt(columns)

    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden), 1.0
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (shape.hidden,), None
        yield projection(at + "self_attn.q_proj.weight", q, shape.hidden)
        yield projection(at + "self_attn.k_proj.weight", kv, shape.hidden)
        yield projection(at + "self_attn.v_proj.weight", kv, shape.hidden)
        yield projection(at + "self_attn.o_proj.weight", shape.hidden, q)
        yield at + "post_attention_layernorm.weight", (shape.hidden,), None
        yield projection(at + "mlp.gate_proj.weight", shape.intermediate, shape.hidden)
        yield projection(at + "mlp.up_proj.weight", shape.intermediate, shape.hidden)
        yield projection(at + "mlp.down_proj.weight", shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,), None
    yield projection("lm_head.weight", shape.vocab, shape.hidden)


def write(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Writes config.json and model.safetensors (float16; engines cast on load), replacing what is there.

    Equal arguments give equal weights. config.json goes last: a directory that has it is complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").unlink(missing_ok=True)
    random = np.random.Generator(np.random.PCG64(seed))
    tensors: dict[str, NDArray[np.float16]] = {}
    for name, size, deviation in _tensors(shape):
        if deviation is None:
            tensors[name] = np.ones(size, np.float16)
        else:
            values = random.standard_normal(size, np.float32) * np.float32(deviation)
            tensors[name] = values.astype(np.float16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
        json.dump(config_of(shape) | {"kvtier_tiny_llama": {"format": FORMAT, "seed": seed}}, file, indent=2)
    os.replace(file.name, directory / "config.json")


def ensure(directory: Path, shape: Shape, seed: int = 0) -> Path:
    """Writes the model unless `directory` already holds exactly this one. Returns `directory`."""
    wanted = config_of(shape) | {"kvtier_tiny_llama": {"format": FORMAT, "seed": seed}}
    try:
        if json.loads((directory / "config.json").read_text()) == wanted:
            return directory
    except (OSError, ValueError):
        pass  # absent or damaged, so it is written anew
    write(directory, shape, seed)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a small random Llama that any engine can serve.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ensure(options.directory, PRESETS[options.preset], options.seed)
    print(options.directory)


if __name__ == "__main__":
    main()
