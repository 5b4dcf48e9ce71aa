"""A random workload on two real engines that share one real daemon, with trouble for the daemon, and its
judgement by two engines without a connector.

The order of things is made from a seed. How far an engine is when its daemon dies depends on the machine too,
so a seed brings the same requests and the same trouble again, not the same interleaving.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_vllm.config import ConnectorConfig

from tests.support.daemon import DaemonHost, until
from tests.support.judging import Verdict, compare, mistakes
from tests.support.process import DEADLINE_S
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import BLOCK, PATIENT_S, Rig, full_blocks, kv_transfer_config, prompt
from tests.vllm.workload import Ask, asks

ENGINES = ("a", "b")
MANY = 40
"""Requests of one engine that are under way at once; far more than its KV blocks hold."""
TIDES = [MANY, MANY, MANY, MANY, MANY, 2]
"""Now and then there are only a few: their rounding is that of other kernels."""
CONTROL_TIDES = [MANY, MANY, MANY, 2, 1]
"""Relatively more of these, so that the control shows all rounding that there is."""
PER_TROUBLE = 1_200
"""Requests for each round of `TROUBLE`."""
WRONG_REQUESTS = 30
WARM_TOKENS = 64
ROOMY_BLOCKS = 1_024
"""Of an engine that hardly forgets and never preempts."""
SLICE_STEPS = 5
"""Between one look of the harness and the next."""
WORK_TIMEOUT_S = 180.0
"""For a slice, or a whole run of an oracle's part: only a hung engine takes so long."""
ORACLE_STEPS = 100
STALLED_S = 300.0
"""So long without a request that ends: nothing goes on any more."""
NEVER_LEAVE: dict[str, str] = (
    {"on_reset": "keep"}
    if "on_reset" in {field.name for field in dataclasses.fields(ConnectorConfig)}
    else {}
)
"""So that a reset of an engine's own prefix cache does not take it out of the namespace that both share."""
HELD = ("kvtier_sessions", "kvtier_leases", "kvtier_client_mapped_bytes", "kvtier_transfers_active")
BOOKS = (
    "[len(side._requests), len(side._leaving), len(side._matcher._matches), len(side._matcher._since_s),"
    " len(side._matcher._waiting), len(side._ahead._unasked), len(side._ahead._prefetched),"
    " len(worker._loads), len(worker._stores), len(worker._held)]"
)
"""Of the connector: all of them are empty when nothing is left to do."""
TROUBLE = {
    "kill": 6,
    "freeze": 3,
    "freeze impatient": 1,
    "kill worker": 2,
    "drain": 1,
    "clear": 1,
    "reset a": 3,
    "reset b": 3,
}
"""How often what happens in a workload."""
LEAST = {
    "loads": 100,
    "loaded_tokens": 5_000,
    "aborts": 20,
    "aborted_loads": 20,
    "preemptions": 1,  # a request waits for blocks that stores are about to give back, first of all
    "resets": 3,
    "connector_resets": 1,
    "daemon_kills": 5,
    "daemon_stops": 3,
    "worker_kills": 1,
    "planned_restarts": 1,
    "clears": 1,
    "turns": 100,
    "several_answers": 20,
    "prompt_logprobs": 20,
    "salted_hits": 20,
    "loaded_by_the_other_engine": 1,
}
"""What a workload of a thousand requests must have met, or it proves too little."""


def options_of(model: Path, dtype: str, num_blocks: int) -> EngineOptions:
    """Of an engine that should have too few blocks for what it is asked."""
    return EngineOptions(
        model,
        dtype=dtype,
        max_model_len=1024,
        num_blocks=num_blocks,
        max_num_batched_tokens=256,
        # Two engines at once on two cores: OpenMP's threads would wait for each other.
        environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        extra={"max_num_seqs": 16, "scheduling_policy": "priority"},
    )


@dataclass
class Report:
    """What a workload came to."""

    counts: Counter[str]
    judged: Verdict
    control: Verdict
    mistakes: list[str]
    spoilt: Verdict
    """Of the negative control."""
    spoilt_mistakes: list[str]

    def text(self) -> str:
        """For people."""
        counted = ", ".join(
            f"{number:,} {name.replace('_', ' ')}" for name, number in sorted(self.counts.items())
        )
        verdicts = {"judged": self.judged, "control": self.control, "spoilt": self.spoilt}
        return "\n  ".join([counted, *(f"{name:<8} {verdict.text()}" for name, verdict in verdicts.items())])

    def shortfalls(self) -> list[str]:
        """Of `LEAST`, what was not met."""
        return [
            f"{self.counts[name]:,} {name.replace('_', ' ')}, {number:,} are wanted"
            for name, number in LEAST.items()
            if self.counts[name] < number
        ]


def wait_ready(engine: Engine) -> None:
    """It has computed something, too: vLLM 0.32 dies of an illegal instruction on a processor with AMX if its
    first step ever, in bfloat16, computes a few tokens only, as that of a fresh engine does that hits all the
    rest."""
    engine.wait_ready()
    engine.generate([prompt(WARM_TOKENS, seed=999)], max_tokens=1)


def begin(
    engine: Engine,
    asked: list[Ask],
    seed: str = "",
    tides: Sequence[int] = (MANY,),
    *,
    aborts: bool = False,
    spoil: int = 0,
) -> None:
    """Hands an engine its requests; see `workload_engine.Work`."""
    told = [ask.as_json() for ask in asked]
    engine.call("work", asks=told, seed=seed, tides=list(tides), aborts=aborts, spoil=spoil)


def outcomes(engine: Engine) -> dict[str, Any]:
    """Of all it was asked, by name."""
    found: dict[str, Any] = engine.call("outcomes", WORK_TIMEOUT_S)["outcomes"]
    return found


def _again(name: str, outcome: dict[str, Any]) -> Ask:
    """The same, of an engine that is to answer it whole."""
    return Ask(
        name,
        outcome["prompt"],
        outcome["after"],
        whole=True,
        max_tokens=outcome["max_tokens"],
        answers=outcome["wanted_answers"],
        priority=outcome["priority"],
        salt=outcome["salt"],
        prompt_logprobs=outcome["wants_prompt_logprobs"],
    )


class Workload:
    """Two engines at work, and what happens to their daemon meanwhile."""

    def __init__(
        self,
        host: DaemonHost,
        options: EngineOptions,
        folder: Path,
        seed: int,
        requests: int,
        *,
        say: Callable[[str], None],
    ) -> None:
        """`host` is running. `requests`: of both engines together."""
        self._host = host
        self._options = options
        self._folder = folder
        self._seed = seed
        self._say = say
        self._chance = random.Random(f"{seed} trouble")
        self._asks = {name: list(asks(seed, name, requests // len(ENGINES))) for name in ENGINES}
        self._rigs: dict[str, Rig] = {}
        self._progress: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> Report:
        """All of it. Raises AssertionError if something is still held by anybody at the end."""
        extra = NEVER_LEAVE | {"load_start_deadline_s": PATIENT_S}
        config = kv_transfer_config(self._host.socket, **extra)
        attached = dataclasses.replace(self._options, kv_transfer_config=config)
        # Each engine has another scheduler loop: one is a step ahead of its workers.
        ahead = {"a": False, "b": True}
        engines: dict[str, Engine] = {}
        try:
            for name in ENGINES:
                one = dataclasses.replace(attached, extra=attached.extra | {"async_scheduling": ahead[name]})
                engines[name] = Engine.launch(one, self._folder / f"{name}.log")
            for name, engine in engines.items():
                wait_ready(engine)
                self._rigs[name] = Rig(self._host, engine)
                self._rigs[name].patient()
                self._rigs[name].wait_ready()
            self._share_one()
            found = self._work()
            self._account()
            spoilt = self._work_on_a_wrong_block()
            for engine in engines.values():
                engine.stop()
            self._nobody_is_left()
        finally:
            for engine in engines.values():
                engine.kill()
        oracle, control = self._judges(found | spoilt)
        right, wrong = compare(oracle, found), compare(oracle, spoilt)
        known = compare(oracle, control)
        return Report(self.counts, right, known, mistakes(right, known), wrong, mistakes(wrong, known))

    # --- the engines at work

    def _share_one(self) -> None:
        """What one engine has stored the other loads."""
        one, other = (self._rigs[name] for name in ENGINES)
        tokens = prompt(5 * BLOCK + 1, seed=self._seed % 1_013)
        first = one.generate(tokens)
        one.wait_stored()
        second = other.generate(tokens)
        assert second.tokens == first.tokens
        self.counts["loaded_by_the_other_engine"] += second.num_cached_tokens == full_blocks(len(tokens))

    def _work(self) -> dict[str, Any]:
        """Until every request is over; what each came to."""
        for name, rig in self._rigs.items():
            begin(rig.engine, self._asks[name], f"{self._seed} {name}", TIDES, aborts=True)
        total = sum(len(asked) for asked in self._asks.values())
        times = max(1, round(total / PER_TROUBLE))
        acts = [act for act, often in TROUBLE.items() for _ in range(often * times)]
        self._chance.shuffle(acts)
        acts.append("leave")  # the last one: from then on they share nothing
        # The first tenth is stored before anything happens, the last tenth ends in peace.
        due = [total * (0.1 + 0.8 * number / len(acts)) for number in range(len(acts))]
        done, since_s = 0, time.monotonic()
        while True:
            self._go_on()
            before, done = done, total - self._left
            if done > before:
                since_s = time.monotonic()
            assert time.monotonic() - since_s < STALLED_S, f"no request ends: {self._progress}"
            if not self._left:
                break
            if acts and done >= due[0]:
                due.pop(0)
                self._say(f"{done:,} of {total:,} requests are over; next: {acts[0]}")
                self._act(acts.pop(0))
        self._say(f"{total:,} requests are over")
        found: dict[str, Any] = {}
        for rig in self._rigs.values():
            found |= outcomes(rig.engine)
        for progress in self._progress.values():
            self.counts.update(progress["counts"])
        return found

    def _work_on_a_wrong_block(self) -> dict[str, Any]:
        """The negative control: some more requests, and of one load another block than it should be. What
        comes of it."""
        rig = self._rigs[ENGINES[0]]
        found: dict[str, Any] = {}
        for again in range(2):
            rig.wait_ready()
            rig.wait_stored()
            rig.forget()
            more = [
                dataclasses.replace(ask, name=f"{ask.name}again{again}", after="", abort_after_steps=-1)
                for ask in asks(self._seed, "wrong", WRONG_REQUESTS)
            ]
            begin(rig.engine, more, spoil=again)
            while (progress := rig.engine.call("go_on", steps=ORACLE_STEPS))["left"]:
                pass
            self.counts["spoilt"] += progress["counts"].get("spoilt", 0)
            found |= outcomes(rig.engine)
        rig.forget()
        return found

    def _judges(self, found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same prompts on an engine that caches nothing and computes each in one piece, and on one that
        caches by itself: what they answer."""
        again = [_again(name, outcome) for name, outcome in found.items()]
        uncached = {"enable_prefix_caching": False, "scheduling_policy": "fcfs", "max_num_seqs": 32}
        # With room for as much as the daemon has: a hit holds what was computed in another way, a token at a
        # time for example, and that rounds otherwise.
        control = dataclasses.replace(self._options, num_blocks=ROOMY_BLOCKS)
        oracle = dataclasses.replace(
            control,
            max_num_batched_tokens=2_048,
            extra=self._options.extra | uncached,
        )
        engines: list[Engine] = []
        try:
            for name, options in (("oracle", oracle), ("control", control)):
                engines.append(Engine.launch(options, self._folder / f"{name}.log"))
            for engine in engines:
                wait_ready(engine)
            begin(engines[0], [dataclasses.replace(ask, answers=1, priority=0) for ask in again])
            begin(engines[1], again, f"{self._seed} control", CONTROL_TIDES)
            busy = list(engines)
            while busy:
                for engine in busy:
                    engine.send("go_on", steps=ORACLE_STEPS)
                progress = [engine.receive(WORK_TIMEOUT_S) for engine in busy]
                busy = [engine for engine, one in zip(busy, progress, strict=True) if one["left"]]
            right, known = (outcomes(engine) for engine in engines)
            self._say("an engine that caches nothing has answered the same, and one without a connector")
            for engine in engines:
                engine.stop()
        finally:
            for engine in engines:
                engine.kill()
        return right, known

    @property
    def _left(self) -> int:
        return sum(progress["left"] for progress in self._progress.values())

    def _go_on(self, meanwhile: Callable[[], None] | None = None) -> None:
        """A slice of both engines, at the same time as what else happens."""
        for rig in self._rigs.values():
            rig.engine.send("go_on", steps=SLICE_STEPS)
        if meanwhile is not None:
            meanwhile()
        for name, rig in self._rigs.items():
            self._progress[name] = rig.engine.receive(WORK_TIMEOUT_S)

    def _slices(self, most: int) -> None:
        for _ in range(self._chance.randrange(most + 1)):
            self._go_on()

    def _act(self, act: str) -> None:
        what, _, how = act.partition(" ")
        match what:
            case "kill" if not how:
                self._go_on(self._host.kill9)
                self.counts["daemon_kills"] += 1
                self._slices(2)
                self._go_on(self._host.start)
            case "kill":
                self._kill_worker()
            case "freeze":
                self._freeze(patient=not how)
            case "drain":
                self._drain()
            case "clear":
                self._go_on(self._clear)
                self.counts["clears"] += 1
            case "reset":
                self._rigs[how].engine.call("reset", what="cache")
                return
            case "leave":
                busiest = max(self._progress, key=lambda name: int(self._progress[name]["left"]))
                self._rigs[busiest].engine.call("reset", what="connector")
                return
        self._ready()

    def _ready(self) -> None:
        """The engines need not step for that."""
        for rig in self._rigs.values():
            rig.wait_ready()

    def _kill_worker(self) -> None:
        if any(worker.state == "live" for worker in self._host.status().workers):
            self._go_on(lambda: self._count_kill(self._host.kill_worker()))

    def _count_kill(self, _: int) -> None:
        self.counts["worker_kills"] += 1

    def _freeze(self, patient: bool) -> None:
        """Patient engines wait for their daemon, others go on without it."""
        if not patient:
            for rig in self._rigs.values():
                rig.patient(False)
        workers = self._chance.random() < 0.5
        self._go_on(lambda: self._host.freeze(workers=workers))
        self.counts["daemon_stops"] += 1
        self._slices(4)
        self._go_on(self._host.thaw)
        if not patient:
            for rig in self._rigs.values():
                rig.patient()

    def _drain(self) -> None:
        """For a restart, which takes as long as the engines' copies do."""
        drain = self._host.begin_drain()
        while drain.poll() is None:
            self._go_on()
        self._host.drained(drain)
        self.counts["planned_restarts"] += 1
        self._go_on(self._host.start)

    def _clear(self) -> None:
        command = [sys.executable, "-m", "kvtierd.ctl", "clear", "--yes", f"--socket={self._host.socket}"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    # --- what is left

    def _account(self) -> None:
        """No request, no block, and nothing in anybody's books."""
        self._ready()
        for name, rig in self._rigs.items():
            assert rig.engine.drain() == {"requests": {}, "free_blocks": self._options.num_blocks - 1}, name
            rig.wait_stored()
            rig.engine.call("step")  # what the daemon has said since
            books = rig.look(BOOKS)
            assert not any(books), f"the connector of engine {name} still holds something: {books}"
            totals = rig.look("side.totals()")
            for counted in (
                "loads",
                "loads_failed",
                "loaded_tokens",
                "stores",
                "stores_refused",
                "stored_blocks",
            ):
                self.counts[counted] += int(totals[counted])
        until(lambda: self._host.status().transfers_active == 0, "the daemon has no transfer left")
        until(lambda: self._host.status().leases == 0, "the daemon has no lease left")
        status = self._host.status()
        assert status.leased_blocks == 0
        assert status.counters.integrity_failures == 0

    def _nobody_is_left(self) -> None:
        until(lambda: not self._host.status().instances, "the daemon noticed the engines' end")
        until(lambda: not self._held(), "nothing of the engines is held by the daemon")

    def _held(self) -> dict[str, float]:
        return {
            name: value for name, value in self._host.metrics().items() if name.startswith(HELD) and value
        }
