"""An engine's side of a peer, in a process of its own and in the peer's environment: `engine_process` is the
other end.

Started as `python -m tests.benchmarks.peers.engine_child MODULE:CLASS OPTIONS_JSON`. Reads one command a line
on stdin and answers each with one line. Everything is timed here, around the peer's calls and nothing else.
The end of stdin ends it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TextIO

import numpy as np

from tests.benchmarks.peers import content
from tests.benchmarks.peers.driver import DEADLINE_S, PeerEngine, PeerRefused, PeerShape, Prompt

POLL_S = 0.0005
FINDABLE_S = 5.0


def make_engine(name: str, options: Mapping[str, Any]) -> PeerEngine:
    """An engine's side by MODULE:CLASS."""
    module, kind = name.split(":")
    engine: PeerEngine = getattr(importlib.import_module(module), kind)(**options)
    return engine


def scattered(blocks: int, count: int) -> list[int]:
    """Which of the engine's blocks 1 to `blocks` a prompt of `count` blocks has: without order, as in an
    engine that has run for a while, and the same for all peers. Block 0 is never used, as in vLLM: LMCache
    takes its number for "no block"."""
    chosen: list[int] = (1 + np.random.default_rng(5).permutation(blocks)[:count]).tolist()
    return chosen


class EngineCommands:
    """Carries out commands on one engine."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name, self._options = name, options
        self._engine = make_engine(name, options)
        self._shape: PeerShape | None = None
        self._blocks = 0

    def handle(self, command: dict[str, Any]) -> Any:
        """Runs the method of the command's name."""
        return getattr(self, f"do_{command.pop('op')}")(**command)

    def do_register(
        self, address: dict[str, Any], shape: dict[str, Any], blocks: int, instance: str
    ) -> float:
        """Seconds until the peer has the engine's memory."""
        self._engine.close()
        self._shape, self._blocks = PeerShape(**shape), blocks
        began_s = time.perf_counter()
        self._engine.register(address, self._shape, blocks + 1, instance)
        return time.perf_counter() - began_s

    def do_store(self, seed: int, blocks: int, fill: bool = True) -> dict[str, float]:
        """Fills blocks with a prompt's content and stores them. `late_s`: how long after the peer has said
        that it is done not all of it could be found."""
        prompt, ids = Prompt(seed, blocks), scattered(self._blocks, blocks)
        if fill:
            content.fill(self._engine.memory, prompt, ids)
        names = self._engine.names_of(prompt)
        seconds = self._timed(lambda: self._engine.store(names, ids))
        return {"seconds": seconds, "late_s": self._until_found(names, blocks)}

    def do_load(self, seed: int, blocks: int) -> dict[str, float]:
        """Looks a prompt up, wipes the engine's blocks, loads, and compares every byte."""
        prompt, ids = Prompt(seed, blocks), scattered(self._blocks, blocks)
        names = self._engine.names_of(prompt)
        content.wipe(self._engine.memory, ids)
        hits, found = self._engine.lookup(names)
        if hits != blocks:
            self._engine.give_back(found)
            raise PeerRefused(f"{hits} of {blocks} blocks hit")
        seconds = self._timed(lambda: self._engine.load(names, found, ids))
        return {"seconds": seconds, "wrong": content.wrong_blocks(self._engine.memory, prompt, ids)}

    def do_try_load(self, seed: int, blocks: int) -> dict[str, Any]:
        """As `do_load` of however much is there, without a failure: how many blocks hit, were loaded with the
        right bytes, and with wrong ones."""
        prompt, ids = Prompt(seed, blocks), scattered(self._blocks, blocks)
        content.wipe(self._engine.memory, ids)
        hits, found = self._engine.lookup(self._engine.names_of(prompt))
        if not hits:
            self._engine.give_back(found)
            return {"hits": 0, "wrong": 0, "right": 0, "error": ""}
        part = Prompt(seed, hits)
        try:
            self._engine.load(self._engine.names_of(part), found, ids[:hits])
        except PeerRefused as error:
            return {"hits": hits, "wrong": 0, "right": 0, "error": str(error)}
        wrong = content.wrong_blocks(self._engine.memory, part, ids[:hits])
        return {"hits": hits, "wrong": wrong, "right": hits - wrong, "error": ""}

    def do_lookups(self, seeds: Sequence[int], blocks: int, times: int) -> list[float]:
        """Microseconds of each of `times` lookups of that many hashes, with what it holds given back. All of
        them have to hit."""
        names = [self._engine.names_of(Prompt(seed, blocks)) for seed in seeds]
        return self._lookups(names, blocks, times=times)

    def do_fan_out(
        self, address: dict[str, Any], shape: dict[str, Any], seeds: Sequence[int], blocks: int, callers: int
    ) -> dict[str, Any]:
        """Lookups as above by that many processes at once, each with a connection of its own, for a moment:
        microseconds of each, and the seconds that it took."""
        self._engine.warm()
        context = multiprocessing.get_context("fork")
        ready, results = context.Barrier(callers + 1), context.SimpleQueue()
        arguments = (address, PeerShape(**shape), list(seeds), blocks, ready, results)
        processes = [
            context.Process(target=self._call, args=(number, *arguments), daemon=True)
            for number in range(callers)
        ]
        for process in processes:
            process.start()
        try:
            ready.wait(DEADLINE_S)
            answers = [results.get() for _ in processes]
        finally:
            for process in processes:
                process.join(DEADLINE_S if ready.n_waiting == 0 and not ready.broken else 1.0)
                process.kill()
        if failed := [answer for answer in answers if isinstance(answer, str)]:
            raise PeerRefused(failed[0])
        return {
            "us": [us for answer in answers for us in answer["us"]],
            "lookups_per_s": sum(len(answer["us"]) / answer["seconds"] for answer in answers),
        }

    def do_pump(self, what: str, seeds: Sequence[int], blocks: int, seconds: float) -> dict[str, Any]:
        """Stores, loads or looks up one thing after another for so long: microseconds of each, bytes moved,
        and blocks with wrong bytes, which are compared outside of the time that counts."""
        ids = scattered(self._blocks, blocks)
        taken: list[float] = []
        wrong = refused = 0
        ends_s = time.perf_counter() + seconds
        number = 0
        while time.perf_counter() < ends_s:
            prompt = Prompt(seeds[number % len(seeds)] + (number if what == "store" else 0), blocks)
            number += 1
            names = self._engine.names_of(prompt)
            if what == "store":
                content.fill(self._engine.memory, prompt, ids)
                taken.append(self._timed(partial(self._engine.store, names, ids)) * 1e6)
                continue
            if what == "lookup":
                taken += self._lookups([names], blocks, times=1)
                continue
            content.wipe(self._engine.memory, ids)
            hits, found = self._engine.lookup(names)
            if hits != blocks:
                self._engine.give_back(found)
                refused += 1
                continue
            taken.append(self._timed(partial(self._engine.load, names, found, ids)) * 1e6)
            wrong += content.wrong_blocks(self._engine.memory, prompt, ids)
        assert self._shape is not None
        self._engine.settle()
        return {
            "us": taken,
            "bytes": len(taken) * blocks * self._shape.block_bytes,
            "wrong": wrong,
            "refused": refused,
        }

    def do_cancel(self, seed: int, blocks: int) -> dict[str, Any]:
        """Begins a load and takes it back: seconds until the blocks may be used again."""
        names = self._engine.names_of(Prompt(seed, blocks))
        ids = scattered(self._blocks, blocks)
        hits, found = self._engine.lookup(names)
        if hits != blocks:
            raise PeerRefused(f"{hits} of {blocks} blocks hit")
        began_s = time.perf_counter()
        how = self._engine.cancel(names, found, ids)
        return {"seconds": time.perf_counter() - began_s, "how": how}

    def do_until_found(self, seed: int, blocks: int, most_s: float) -> dict[str, Any]:
        """Asks until a prompt is found, as after a restart of the server: how much is, and after how long."""
        names = self._engine.names_of(Prompt(seed, blocks))
        began_s = time.perf_counter()
        hits = 0
        while not hits and time.perf_counter() - began_s < most_s:
            hits, found = self._engine.lookup(names)
            self._engine.give_back(found)
            self._engine.settle()
            time.sleep(POLL_S)
        return {"hits": hits, "seconds": time.perf_counter() - began_s}

    def do_hold(self, seed: int, blocks: int) -> None:
        """Looks a prompt up and keeps what the lookup holds."""
        hits, _ = self._engine.lookup(self._engine.names_of(Prompt(seed, blocks)))
        if hits != blocks:
            raise PeerRefused(f"{hits} of {blocks} blocks hit")

    def do_held(self, seed: int, blocks: int) -> int:
        """How many blocks of a prompt somebody holds."""
        return self._engine.held(self._engine.names_of(Prompt(seed, blocks)))

    def do_warm(self) -> None:
        self._engine.warm()

    def do_clear(self) -> None:
        self._engine.clear()

    def do_stats(self) -> dict[str, float]:
        return self._engine.stats()

    def do_close(self) -> None:
        self._engine.close()

    def _timed(self, call: Callable[[], object]) -> float:
        self._engine.settle()
        gc.disable()
        began_s = time.perf_counter()
        try:
            call()
            return time.perf_counter() - began_s
        finally:
            gc.enable()

    def _lookups(
        self, names: Sequence[Any], blocks: int, *, times: int | None = None, seconds: float = 0.0
    ) -> list[float]:
        taken = []
        ends_s = time.perf_counter() + seconds
        number = 0
        while number < times if times is not None else time.perf_counter() < ends_s:
            wanted = names[number % len(names)]
            began_ns = time.perf_counter_ns()
            hits, found = self._engine.lookup(wanted)
            self._engine.give_back(found)
            taken.append((time.perf_counter_ns() - began_ns) / 1e3)
            number += 1
            if hits != blocks:
                raise PeerRefused(f"{hits} of {blocks} hashes hit")
        self._engine.settle()
        return taken

    def _until_found(self, names: Any, blocks: int) -> float:
        began_s = time.perf_counter()
        late_s = 0.0
        while True:
            hits, found = self._engine.lookup(names)
            self._engine.give_back(found)
            self._engine.settle()
            if hits == blocks:
                return late_s
            late_s = time.perf_counter() - began_s
            if late_s > FINDABLE_S:
                raise PeerRefused(f"{hits} of {blocks} stored blocks hit {late_s:.0f} s later")
            time.sleep(POLL_S)

    def _call(
        self,
        number: int,
        address: dict[str, Any],
        shape: PeerShape,
        seeds: Sequence[int],
        blocks: int,
        ready: Any,
        results: Any,
    ) -> None:
        try:
            engine = self._engine = make_engine(self._name, self._options)
            engine.register(address, shape, 17, f"caller-{os.getpid()}-{number}")
            names = [engine.names_of(Prompt(seed, blocks)) for seed in seeds]
            self._lookups(names, blocks, times=2)
            ready.wait(DEADLINE_S)
            began_s = time.perf_counter()
            taken = self._lookups(names, blocks, seconds=FAN_OUT_S)
            results.put({"us": taken, "seconds": time.perf_counter() - began_s})
            engine.close()
        except BaseException as error:
            results.put(f"{type(error).__name__}: {error}")
            ready.abort()
        end(0)


FAN_OUT_S = 2.0


def end(status: int) -> NoReturn:
    """Ends this process without waiting for threads of clients, but not before what clients have to remove
    when their process ends, like files in /dev/shm."""
    gc.collect()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


def _claim_stdout() -> TextIO:
    """Keeps the answers' channel: libraries of peers print."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main() -> int:
    answers = _claim_stdout()
    commands = EngineCommands(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        try:
            answer = {"answer": commands.handle(json.loads(line))}
        except PeerRefused as error:
            answer = {"refused": str(error)}
        except Exception:
            traceback.print_exc()
            answer = {"failed": traceback.format_exc(limit=-2)}
        answers.write(json.dumps(answer) + "\n")
    commands.do_close()
    return 0


if __name__ == "__main__":
    status = main()
    end(status)
