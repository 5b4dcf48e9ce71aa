"""Adapters for engines around a model that only checks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.daemon import until
from tests.vllm.mini_engine import TOKENS, MiniEngine
from tests.vllm.mini_rig import compute
from tests.vllm.rig import prompt

LENGTH, WHOLE = 6 * TOKENS + 5, 6 * TOKENS


def write_adapter(folder: Path, weights: int = 0, rank: int = 8) -> Path:
    """An adapter's files; equal arguments, equal content."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    fresh = folder / "fresh"
    save_file({"lora_A.weight": np.full((rank, 16), weights, np.float16)}, fresh)
    os.replace(fresh, folder / "adapter_model.safetensors")
    return folder


def lora_request(folder: Path, name: str = "one", number: int = 1) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder))


def asking(folder: Path, **which: Any) -> Any:
    """As much of a request as its keys depend on."""
    return SimpleNamespace(lora_request=lora_request(folder, **which))


class Shared:
    """What requests find of each other in kvtierd, in an engine that forgets everything itself."""

    def __init__(self, engine: MiniEngine) -> None:
        self.engine = engine
        self._count = 0

    def found(self, folder: Path | None = None, **which: Any) -> int:
        """Tokens that a request is spared."""
        self.engine.forget()
        self._count += 1
        request = {} if folder is None else {"lora_request": lora_request(folder, **which)}
        return compute(self.engine, f"r{self._count}", prompt(LENGTH), **request)

    def identified(self, folder: Path, **which: Any) -> None:
        """Has the adapter loaded, and waits until its files are read."""
        self.engine.load_adapter(lora_request(folder, **which))
        adapters = self.engine.connector._scheduler._adapters
        until(lambda: adapters.keys(asking(folder, **which)) is not None, "the adapter is identified")
