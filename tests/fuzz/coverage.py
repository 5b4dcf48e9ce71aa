"""How many lines of a target's modules its corpus reaches, and how many as many random inputs do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from random import Random
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.target import CORPUS, CRASHES, Target, inputs, load

SEED = 7


def compare(name: str) -> str:
    """Runs the target's corpus, and as many random inputs of any length that it takes."""
    target = load(name)
    kept = [path.read_bytes() for folder in (CORPUS, CRASHES) for path in inputs(name, folder)]
    random = Random(SEED)
    blind = [random.randbytes(random.randint(0, target.bytes_max)) for _ in kept]
    every = _lines(target)
    corpus, by_chance = (len(reached(target, data) & every) for data in (kept, blind))
    share = 100 / max(1, len(every))
    return (
        f"{name}: {len(kept)} inputs reach {corpus} of {len(every)} lines ({corpus * share:.0f} %), as many "
        f"random ones {by_chance} ({by_chance * share:.0f} %)"
    )


def reached(target: Target, data: Iterable[bytes]) -> set[tuple[str, int]]:
    """The lines of all functions that run, by file and number."""
    files = {_file(module) for module in target.modules}
    lines: set[tuple[str, int]] = set()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename in files else None

    for each in data:
        sys.settrace(call)
        try:
            target.run(each)
        finally:
            sys.settrace(None)
    return lines


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
