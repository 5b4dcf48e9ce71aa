"""Hostile input of every kind: the inputs that are kept break nothing, nor do those that the fuzzer finds in
the time that it is given; and each target notices what is broken on purpose.

`make test` gives each target `SHORT_S` seconds, and `make test-security` KVTIER_FUZZ_SECONDS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier.session.index import Index
from kvtierd.cache.facade import Cache
from kvtierd.core.errors import Reason, Refusal
from kvtierd.memory import recovery
from kvtierd.rpc import hello, memory_check, side
from kvtierd.tiers.disk.slab import Slab
from kvtierd.workers.copy.parts import PartTask

from tests.fuzz import session
from tests.fuzz.coverage import lines
from tests.fuzz.target import CORPUS, CRASHES, NAMES, inputs, load

SHORT_S = 1
SECONDS = int(os.environ.get("KVTIER_FUZZ_SECONDS", SHORT_S))
STARTUP_S = 300
CORPUS_BYTES_MAX, CORPUS_FILES_MAX = 1 << 20, 300


@pytest.mark.parametrize("name", NAMES)
def test_the_inputs_that_are_kept_break_nothing(name: str) -> None:
    target = load(name)
    kept = [path for folder in (CORPUS, CRASHES) for path in inputs(name, folder)]
    assert kept, f"tests/fuzz/corpus/{name} is empty"
    for data in (*target.seeds, *(path.read_bytes() for path in kept)):
        target.run(data)


def test_the_corpora_are_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(sizes) < CORPUS_BYTES_MAX
    assert len(sizes) < CORPUS_FILES_MAX


@pytest.mark.skipif(not session.AVAILABLE, reason="atheris is not installed: it is for x86-64 Linux only")
@pytest.mark.timeout(len(NAMES) * SECONDS + STARTUP_S)
def test_what_the_fuzzer_finds_breaks_nothing(
    tmp_path: Path, proved: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    is_long = SECONDS > SHORT_S
    results = []
    for names in [[name] for name in NAMES] if is_long else [NAMES]:
        if is_long:
            with capsys.disabled():
                print(f"\nfuzzing {names[0]} for {SECONDS} s", flush=True)
        corpus_of = session.grown if is_long else (lambda name: tmp_path / name)
        for result in session.fuzz(names, corpus_of, seconds=SECONDS):
            results.append(result)
            with capsys.disabled() if is_long else nullcontext():
                print(result, flush=True)
    broken = [str(result) for result in results if not result.passed]
    assert not broken, "\n\n".join(broken)
    if is_long:
        for result in results:
            proved(str(result))
        proved("to keep the new inputs of build/fuzz: python -m tests.fuzz keep TARGET")
    else:
        runs = sum(result.runs for result in results)
        proved(
            f"{runs:,} inputs of the fuzzer for {len(NAMES)} targets broke nothing (seed {results[0].seed})"
        )


# --- what is broken on purpose is noticed ---


def _tell_texts(field: str, value: str, reason: Reason, **_: bool) -> None:
    if len(value) > hello.TEXT_BYTES_MAX:
        raise Refusal(reason, "too long", field=field, value=value)


def _keep_every_copy(found: Any, rows: Any, heads: Any, worlds: Any) -> Any:
    return np.arange(len(heads))


BROKEN: dict[str, tuple[object, str, object]] = {
    "hello": (hello, "_check_text", _tell_texts),
    "stream": (Cache, "end_session", lambda *_: None),
    "side": (side, "_close", lambda fds: fds.clear()),
    "planes": (memory_check, "_check_plane", lambda *_: None),
    "packets": (PartTask, "loadable", lambda self, records, chunk: np.ones(len(self.slots[chunk]), bool)),
    "pool": (recovery, "_youngest", _keep_every_copy),
    "slab": (Slab, "reason_to_remake", lambda self: ""),
    "pages": (Index, "known_run", lambda self, group, hashes, first, end: end - first),
}
"""What is broken for each target: an owner, a name, and what comes in its place."""


@pytest.mark.parametrize("name", NAMES)
def test_a_target_notices_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    target = load(name)
    kept = [path.read_bytes() for folder in (CRASHES, CORPUS) for path in inputs(name, folder)]
    assert any(_breaks(target.run, data) for data in (*target.seeds, *kept))


def _breaks(run: Callable[[bytes], None], data: bytes) -> bool:
    try:
        run(data)
    except Exception:
        return True
    return False


def test_the_corpus_gets_deeper_than_random_bytes() -> None:
    target = load("hello")
    kept = [path.read_bytes() for path in inputs("hello", CORPUS)]
    random = np.random.default_rng(5)
    blind = [random.bytes(int(random.integers(0, target.bytes_max))) for _ in kept]
    assert len(lines(target, kept)) > len(lines(target, blind))
