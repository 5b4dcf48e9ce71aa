"""Runs one engine's part of a random workload, inside the engine's process: the half of `workload_run` there.

It asks, steps and aborts by itself, so that requests meet each other in every state; the other half says how
many steps it goes on for, and makes trouble meanwhile.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.workload import LOGPROBS

ABORTED_LOADS = 0.15
"""So many of the loads that are seen under way are aborted."""
TIDE_STEPS = 40
IDLE_S = 0.0005


@dataclass(eq=False)
class _Request:
    ask: dict[str, Any]
    prompt: list[int]
    asked_at: int
    """Steps taken before."""
    answers: dict[int, Any] = field(default_factory=dict)
    """vLLM's, by their index: they grow."""
    prompt_logprobs: Any = None
    cached: int = 0
    aborted: bool = False
    over: bool = False

    def outcome(self) -> dict[str, Any]:
        """For the judge."""
        return {
            "prompt": self.prompt,
            "after": self.ask["after"],
            "max_tokens": self.ask["max_tokens"],
            "priority": self.ask["priority"],
            "salt": self.ask["salt"],
            "wanted_answers": self.ask["answers"],
            "wants_prompt_logprobs": self.ask["prompt_logprobs"],
            "aborted": self.aborted,
            "cached": self.cached,
            "answers": {
                str(index): {
                    "tokens": list(answer.token_ids),
                    "logprobs": [_plain(step) for step in answer.logprobs or ()],
                    "finish_reason": answer.finish_reason,
                }
                for index, answer in self.answers.items()
            },
            "prompt_logprobs": [_plain(step) for step in self.prompt_logprobs or ()],
        }


def _plain(step: Any) -> dict[str, float] | None:
    return None if step is None else {str(token): value.logprob for token, value in step.items()}


class Work:
    """One engine's requests, from first to last."""

    def __init__(
        self,
        engine: Any,
        core: Any,
        asks: list[dict[str, Any]],
        seed: str,
        tides: list[int],
        aborts: bool,
    ) -> None:
        """`tides`: so many requests are under way at once, one of these for TIDE_STEPS each. `aborts`:
        loads are aborted, too."""
        self._engine, self._core = engine, core
        self._left = asks
        self._chance = random.Random(seed)
        self._tides = tides
        self._outstanding = tides[0]
        self._aborts = aborts
        self._requests: dict[str, _Request] = {}
        self._open: dict[str, _Request] = {}
        self._steps = 0
        self._preempted: dict[str, int] = {}
        self._loading: set[str] = set()
        self._reset: str = ""
        self._to_spoil = 0
        self.counts: Counter[str] = Counter()

    @property
    def left(self) -> int:
        """Requests that are not over."""
        return len(self._left) + len(self._open)

    def go_on(self, steps: int) -> None:
        """At most so many steps; fewer if nothing is left."""
        for _ in range(steps):
            if not self.left:
                return
            if self._steps % TIDE_STEPS == 0:
                self._outstanding = self._chance.choice(self._tides)
            self._ask()
            self._step()
            self._abort()
            self._count_preemptions()
            if self._reset:
                self._try_reset()

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """By the requests' names."""
        return {name: request.outcome() for name, request in self._requests.items()}

    def reset(self, what: str) -> None:
        """As soon as vLLM can: "cache" is the engine's own prefix cache, with all that runs preempted;
        "connector" takes the connector's along. Nothing new is asked until then."""
        self._reset = what

    @property
    def resetting(self) -> bool:
        """Whether a reset is still to come."""
        return bool(self._reset)

    def spoil(self, blocks: int) -> None:
        """Of the next loads that succeed, so many have their first block replaced by another one: what a
        daemon would do that serves the wrong block."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker: Any = get_kv_transfer_group()._worker
        poll = worker.poll
        self._to_spoil = blocks

        def spoiling() -> Any:
            loads = {load.order.request: load.order for load in worker._loads}
            results = poll()
            for request in results.received - results.failed if results is not None else ():
                order = loads[request]
                first = order.block_ids[0][0] if order.block_ids[0] else None
                if self._to_spoil and first is not None and not results.bad_blocks:
                    self._to_spoil -= 1
                    self.counts["spoilt"] += 1
                    self._replace(first)
            return results

        worker.poll = spoiling

    # --- inside

    def _replace(self, block: int) -> None:
        """By what the next one holds, which is of another place or another prompt."""
        import torch

        for layer in self._core.model_executor.driver_worker.model_runner.kv_caches:
            pages = layer.view(torch.int8)
            other = block + 1 if block + 1 < len(pages) else block - 1
            pages[block] = pages[other]

    def _ask(self) -> None:
        while self._left and not self._reset and len(self._open) < self._outstanding:
            ready = next((place for place, ask in enumerate(self._left) if self._may_begin(ask)), None)
            if ready is None:
                return
            self._add(self._left.pop(ready))

    def _may_begin(self, ask: dict[str, Any]) -> bool:
        """Whether the turn before is over, if there is one; who waits for it lets others go first."""
        before = self._requests.get(ask["after"])
        return not ask["after"] or (before is not None and before.over)

    def _add(self, ask: dict[str, Any]) -> None:
        from vllm import SamplingParams

        tokens: list[int] = list(ask["prompt"])
        if ask["after"] and not ask["whole"]:
            before = self._requests[ask["after"]]
            answer = before.answers.get(0)
            tokens = [*before.prompt, *(answer.token_ids if answer is not None else ()), *tokens]
        several = ask["answers"] > 1
        sampling = SamplingParams(
            # vLLM gives several answers to those only who sample: here from the likeliest token.
            temperature=1.0 if several else 0.0,
            top_k=1 if several else 0,
            n=ask["answers"],
            max_tokens=ask["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=LOGPROBS,
            prompt_logprobs=1 if ask["prompt_logprobs"] else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if ask["salt"]:
            prompt["cache_salt"] = ask["salt"]
        request = _Request(ask, tokens, self._steps)
        self._requests[ask["name"]] = self._open[ask["name"]] = request
        self._engine.add_request(ask["name"], prompt, sampling, priority=ask["priority"])

    def _step(self) -> None:
        outputs = self._engine.step()
        self._steps += 1
        if not outputs:
            time.sleep(IDLE_S)
        for output in outputs:
            request = self._requests[output.request_id]
            for answer in output.outputs:
                request.answers[answer.index] = answer
            if output.prompt_logprobs is not None:
                request.prompt_logprobs = output.prompt_logprobs
            request.cached = max(request.cached, output.num_cached_tokens or 0)
            if output.finished:
                self._over(request)

    def _over(self, request: _Request) -> None:
        request.over = True
        del self._open[request.ask["name"]]
        self.counts["requests"] += 1
        self.counts["hits"] += request.cached > 0
        self.counts["turns"] += bool(request.ask["after"])
        self.counts["several_answers"] += request.ask["answers"] > 1
        self.counts["prompt_logprobs"] += request.ask["prompt_logprobs"]
        self.counts["salted_hits"] += bool(request.ask["salt"]) and request.cached > 0

    def _abort(self) -> None:
        for name, request in list(self._open.items()):
            after = request.ask["abort_after_steps"]
            if 0 <= after <= self._steps - request.asked_at:
                self._abort_one(name, "aborts")
        if self._core.scheduler.connector is None or not self._aborts:
            return
        under_way = self._copies()
        for key in under_way - self._loading:
            name = _name(key)
            if name in self._open and self._chance.random() < ABORTED_LOADS:
                self._abort_one(name, "aborted_loads")
        self._loading = under_way

    def _abort_one(self, name: str, counted_as: str) -> None:
        request = self._open[name]
        request.aborted = True
        self.counts[counted_as] += 1
        self._engine.abort_request([name])
        self._over(request)

    def _copies(self) -> set[str]:
        """vLLM's names of the requests that wait for a load of which a part has not landed."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker: Any = get_kv_transfer_group()._worker
        return {
            load.order.request for load in worker._loads if any(not part.state().over for part in load.left)
        }

    def _count_preemptions(self, by_reset: bool = False) -> None:
        for key, request in self._core.scheduler.requests.items():
            more = request.num_preemptions - self._preempted.get(key, 0)
            if more:
                self._preempted[key] = request.num_preemptions
                self.counts["preemptions_by_reset" if by_reset else "preemptions"] += more

    def _try_reset(self) -> None:
        """vLLM cannot while blocks are loaded, or held for those who copy them."""
        scheduler = self._core.scheduler
        states = {request.status.name for request in scheduler.requests.values()}
        if not states <= {"RUNNING", "WAITING", "PREEMPTED"}:
            return
        # Held blocks of preempted requests' stores are fenced in the next step.
        with_connector = self._reset == "connector"
        try:
            done = self._engine.reset_prefix_cache(
                reset_running_requests=True, reset_connector=with_connector
            )
        except RuntimeError:
            done = False
            self.counts["resets_refused"] += 1
        self._count_preemptions(by_reset=True)
        if done:
            self.counts["connector_resets" if with_connector else "resets"] += 1
            self._reset = ""


def _name(key: str) -> str:
    """Of a request, from vLLM's, which has a random end, and a number in front if it has several answers."""
    return key.rsplit("-", 1)[0].rsplit("_", 1)[-1]
