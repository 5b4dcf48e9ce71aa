"""Which lines of a target's modules its inputs reach, and with that, which inputs are worth keeping."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.target import CORPUS, CRASHES, Target, inputs, load

SEED = 7
KEPT_MAX = 36
"""Inputs that are kept of a target."""

Step = tuple[str, int, int]
"""A file, and two of its lines of which the second ran after the first."""


def compare(name: str) -> str:
    """Runs the target's corpus, and as many random inputs of any length that it takes."""
    target = load(name)
    kept = [path.read_bytes() for folder in (CORPUS, CRASHES) for path in inputs(name, folder)]
    random = Random(SEED)
    blind = [random.randbytes(random.randint(0, target.bytes_max)) for _ in kept]
    every = _lines(target)
    corpus, by_chance = (len(lines(target, data) & every) for data in (kept, blind))
    share = 100 / max(1, len(every))
    return (
        f"{name}: {len(kept)} inputs reach {corpus} of {len(every)} lines ({corpus * share:.0f} %), as many "
        f"random ones {by_chance} ({by_chance * share:.0f} %)"
    )


def keep(name: str, found: Path) -> str:
    """Makes the corpus that is committed anew: of its inputs and those in the folder `found`, at most
    `KEPT_MAX` that together reach most steps from line to line. Says what changed."""
    target = load(name)
    before = inputs(name, CORPUS)
    files = [*before, *sorted(path for path in found.iterdir() if path.is_file())]
    steps = {data: _steps(target, [data]) for data in {path.read_bytes() for path in files}}
    # The smallest goes first among those that add the same.
    left = sorted(steps, key=lambda data: (len(data), data))
    chosen: list[bytes] = []
    covered: set[Step] = set()
    while left and len(chosen) < KEPT_MAX:
        best = max(left, key=lambda data: len(steps[data] - covered))
        if not steps[best] - covered:
            break
        covered |= steps[best]
        chosen.append(best)
        left.remove(best)
    for path in before:
        path.unlink()
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for data in chosen:
        (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
    everything = set().union(*steps.values())
    return (
        f"{name}: {len(chosen)} of {len(steps)} inputs are kept ({len(before)} before), "
        f"{sum(map(len, chosen)):,} bytes; they take {len(covered):,} of {len(everything):,} steps"
    )


def lines(target: Target, data: Iterable[bytes]) -> set[tuple[str, int]]:
    """The lines of functions that run, by file and number."""
    return {(file, line) for file, _, line in _steps(target, data)}


def _steps(target: Target, data: Iterable[bytes]) -> set[Step]:
    """Which line of the target's modules follows which in a function; 0 at its beginning."""
    files = {_file(module) for module in target.modules}
    steps: set[Step] = set()

    def call(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        last = 0

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "line":
                steps.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line

    for each in data:
        sys.settrace(call)
        try:
            target.run(each)
        finally:
            sys.settrace(None)
    return steps


def _file(module: str) -> str:
    return str(importlib.import_module(module).__file__)


def _lines(target: Target) -> set[tuple[str, int]]:
    """The lines inside functions, of all modules."""
    found: set[tuple[str, int]] = set()
    for module in target.modules:
        file = _file(module)
        with open(file) as text:
            code = compile(text.read(), file, "exec")
        for function in _functions(code):
            first = function.co_firstlineno
            found |= {(file, line) for *_, line in function.co_lines() if line is not None and line > first}
    return found


def _functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, and not the body of a class
                yield constant
            yield from _functions(constant)
