"""What is fuzzed: a function that takes any bytes, and asserts what must hold whatever they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NAMES = ("hello", "stream", "side", "planes", "packets", "pool", "slab", "pages")
"""All targets, each a module of `tests.fuzz.targets`."""
FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
CRASHES = FOLDER / "crashes"


@dataclass(frozen=True)
class Target:
    """One target."""

    run: Callable[[bytes], None]
    """Raises for an input that breaks a promise: AssertionError, or whatever the product lets through."""
    modules: tuple[str, ...]
    """The Python modules whose coverage counts."""
    guides: tuple[Callable[..., object], ...] = ()
    """Functions of the target itself that guide the fuzzer, where what is fuzzed is native."""
    seeds: tuple[bytes, ...] = (b"",)
    """Inputs to begin with if there is no corpus."""
    bytes_max: int = 512
    """The longest input."""


def load(name: str) -> Target:
    """Imports a target. KeyError for a name that is none."""
    if name not in NAMES:
        raise KeyError(name)
    target = importlib.import_module(f"tests.fuzz.targets.{name}").TARGET
    assert isinstance(target, Target)
    return target


def inputs(name: str, folder: Path) -> list[Path]:
    """The inputs of a target that are kept in the corpus or among the crashes, in a fixed order."""
    return sorted(path for path in (folder / name).glob("*") if path.is_file())
