"""Small random models of other families than the tests' Llama, for real engines.

As with `tools.tiny_llama` the weights are random but the models are not degenerate: the next token depends on
the whole prefix, so a wrong KV block shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tools.tiny_llama import WEIGHT_GAIN

HIDDEN, INTERMEDIATE, VOCAB = 256, 512, 1024
Tensor = tuple[str, tuple[int, ...], float]
"""Name, shape, and standard deviation; below 0: all of it is that, without its sign."""


def _projection(name: str, rows: int, columns: int) -> Tensor:
    return name, (rows, columns), WEIGHT_GAIN / math.sqrt(columns)


def _norm(name: str, size: int, *, around_one: bool = False) -> Tensor:
    """Of weight 1, which some models keep as the distance from 1."""
    return name, (size,), 0.0 if around_one else -1.0


def _mlp(at: str) -> Iterator[Tensor]:
    yield _projection(at + "mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
    yield _projection(at + "mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
    yield _projection(at + "mlp.down_proj.weight", HIDDEN, INTERMEDIATE)


@dataclass(frozen=True)
class Family:
    """One model."""

    config: dict[str, Any]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def tensors(self) -> Iterator[Tensor]:
        yield "model.embed_tokens.weight", (VOCAB, HIDDEN), 1.0
        for layer in range(self.config["num_hidden_layers"]):
            yield from self.layer(f"model.layers.{layer}.")
        yield _norm("model.norm.weight", HIDDEN, around_one=self.around_one)
        if not self.config["tie_word_embeddings"]:
            yield _projection("lm_head.weight", VOCAB, HIDDEN)

    @property
    def around_one(self) -> bool:
        return False

    def layer(self, at: str) -> Iterator[Tensor]:
        """With norms of queries and keys."""
        yield _norm(at + "input_layernorm.weight", HIDDEN, around_one=self.around_one)
        yield from self.attention(at + "self_attn.")
        yield _norm(at + "post_attention_layernorm.weight", HIDDEN, around_one=self.around_one)
        yield from _mlp(at)

    def attention(self, at: str) -> Iterator[Tensor]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield _projection(at + "q_proj.weight", q, HIDDEN)
        yield _projection(at + "k_proj.weight", kv, HIDDEN)
        yield _projection(at + "v_proj.weight", kv, HIDDEN)
        yield _projection(at + "o_proj.weight", HIDDEN, q)
        yield _norm(at + "q_norm.weight", self.head_dim, around_one=self.around_one)
        yield _norm(at + "k_norm.weight", self.head_dim, around_one=self.around_one)


class Gemma(Family):
    """Gemma 3: windows and full attention by turns."""

    @property
    def around_one(self) -> bool:
        return True

    def layer(self, at: str) -> Iterator[Tensor]:
        yield from super().layer(at)
        yield _norm(at + "pre_feedforward_layernorm.weight", HIDDEN, around_one=True)
        yield _norm(at + "post_feedforward_layernorm.weight", HIDDEN, around_one=True)


class DeepSeek(Family):
    """DeepSeek-V2: one latent vector a token, no experts."""

    def attention(self, at: str) -> Iterator[Tensor]:
        config, heads = self.config, self.heads
        rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        latent, value = config["kv_lora_rank"], config["v_head_dim"]
        yield _projection(at + "q_proj.weight", heads * (nope + rope), HIDDEN)
        yield _projection(at + "kv_a_proj_with_mqa.weight", latent + rope, HIDDEN)
        yield _norm(at + "kv_a_layernorm.weight", latent)
        yield _projection(at + "kv_b_proj.weight", heads * (nope + value), latent)
        yield _projection(at + "o_proj.weight", HIDDEN, heads * value)


class Phi(Family):
    """Phi-3, with LongRoPE: the rotation of a long engine has other frequencies than that of a short one."""

    def layer(self, at: str) -> Iterator[Tensor]:
        heads = (self.heads + 2 * self.kv_heads) * self.head_dim
        yield _norm(at + "input_layernorm.weight", HIDDEN)
        yield _projection(at + "self_attn.qkv_proj.weight", heads, HIDDEN)
        yield _projection(at + "self_attn.o_proj.weight", HIDDEN, self.heads * self.head_dim)
        yield _norm(at + "post_attention_layernorm.weight", HIDDEN)
        yield _projection(at + "mlp.gate_up_proj.weight", 2 * INTERMEDIATE, HIDDEN)
        yield _projection(at + "mlp.down_proj.weight", HIDDEN, INTERMEDIATE)


class Falcon(Family):
    """Falcon 7B's kind, whose class writes into its configuration while it is built."""

    def tensors(self) -> Iterator[Tensor]:
        yield "transformer.word_embeddings.weight", (VOCAB, HIDDEN), 1.0
        for layer in range(self.config["num_hidden_layers"]):
            at = f"transformer.h.{layer}."
            for name in ("ln_attn", "ln_mlp"):
                yield from _layer_norm(at + name)
            heads = (self.heads + 2 * self.kv_heads) * self.head_dim
            yield _projection(at + "self_attention.query_key_value.weight", heads, HIDDEN)
            yield _projection(at + "self_attention.dense.weight", HIDDEN, self.heads * self.head_dim)
            yield _projection(at + "mlp.dense_h_to_4h.weight", 4 * HIDDEN, HIDDEN)
            yield _projection(at + "mlp.dense_4h_to_h.weight", HIDDEN, 4 * HIDDEN)
        yield from _layer_norm("transformer.ln_f")
        yield _projection("lm_head.weight", VOCAB, HIDDEN)


def _layer_norm(name: str) -> Iterator[Tensor]:
    yield name + ".weight", (HIDDEN,), -1.0
    yield name + ".bias", (HIDDEN,), 0.0


def _config(architecture: str, model_type: str, layers: int, **others: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | others


WINDOW_TOKENS = 200
FAMILIES: dict[str, Family] = {
    "qwen3": Family(_config("Qwen3ForCausalLM", "qwen3", 4)),
    "gemma3": Gemma(
        _config(
            "Gemma3ForCausalLM",
            "gemma3_text",
            6,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=64,
            sliding_window=WINDOW_TOKENS,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            tie_word_embeddings=True,
        )
    ),
    "deepseek2": DeepSeek(
        _config(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            4,
            num_key_value_heads=4,
            first_k_dense_replace=4,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=1,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            moe_layer_freq=1,
        ),
    ),
}


LONG_ROPE_TOKENS = 512
"""The longest prompt of an engine with the short factors of `long_rope`."""


def long_rope() -> Family:
    """LongRoPE whose two sets of factors differ much."""
    rope = {
        "type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [1.0 + 0.25 * index for index in range(32)],
    }
    return Phi(
        _config(
            "Phi3ForCausalLM",
            "phi3",
            4,
            original_max_position_embeddings=LONG_ROPE_TOKENS,
            rope_scaling=rope,
            pad_token_id=0,
        )
    )


def falcon() -> Family:
    """See Falcon."""
    return Falcon(
        {
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "vocab_size": VOCAB,
            "max_position_embeddings": 2048,
            "new_decoder_architecture": True,
            "multi_query": False,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )


def why_not_cached(family: Family) -> str:
    """Why vLLM's CPU backend caches no prefixes of this family here; empty if it does."""
    import torch

    if not isinstance(family, DeepSeek) or torch.cpu._is_amx_tile_supported():
        return ""
    return "vLLM caches prefixes of MLA models on processors with AMX only: test_latents.py runs everywhere"


def write(directory: Path, family: Family, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    _save(directory, family.tensors(), seed)
    (directory / "config.json").write_text(json.dumps(family.config, indent=2))
    return directory


def write_eagle_head(directory: Path, target: Path, seed: int = 0) -> Path:
    """An EAGLE draft of one layer for the tests' Llama, whose embedding and head it shares. Its guesses are
    seldom right. Returns the directory."""
    config = json.loads((target / "config.json").read_text())
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    tensors = [
        _projection("fc.weight", hidden, 2 * hidden),
        _projection("layers.0.self_attn.q_proj.weight", q, hidden),
        _projection("layers.0.self_attn.k_proj.weight", kv, hidden),
        _projection("layers.0.self_attn.v_proj.weight", kv, hidden),
        _projection("layers.0.self_attn.o_proj.weight", hidden, q),
        _norm("layers.0.post_attention_layernorm.weight", hidden),
        _projection("layers.0.mlp.gate_proj.weight", intermediate, hidden),
        _projection("layers.0.mlp.up_proj.weight", intermediate, hidden),
        _projection("layers.0.mlp.down_proj.weight", hidden, intermediate),
    ]
    directory.mkdir(parents=True, exist_ok=True)
    _save(directory, tensors, seed)
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}, indent=2))
    return directory


def _save(directory: Path, tensors: Iterable[Tensor], seed: int) -> None:
    random = np.random.Generator(np.random.PCG64(seed))
    arrays = {}
    for name, size, deviation in tensors:
        values = random.standard_normal(size, np.float32) * np.float32(deviation)
        arrays[name] = (values if deviation >= 0 else np.full(size, -deviation)).astype(np.float16)
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
