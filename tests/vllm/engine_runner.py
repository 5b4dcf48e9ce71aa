"""One real vLLM engine in this process, driven by JSON lines: the child side of `tests.vllm.engine`.

Started as `python -m tests.vllm.engine_runner OPTIONS_JSON`. Reads one command a line on stdin and answers
each with one line on the stdout it was started with; everything vLLM prints goes to stderr. The end of
stdin means that the controller is gone: the process group is killed at once, whatever the engine is doing.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, TextIO

Command = dict[str, Any]
Answer = dict[str, Any]


def _claim_stdout() -> TextIO:
    """Keeps the answer channel for ourselves: vLLM and its libraries log on stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _read_commands(commands: queue.SimpleQueue[Command]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    # The controller died or gave us up. Only a group of our own may be killed: never the one of a shell.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _overwrite_cache(worker: Any, value: int, blocks: list[int] | None) -> int:
    """Runs in each worker of an engine. Returns the number of its layers."""
    import torch

    layers = worker.model_runner.kv_caches
    for layer in layers:
        pages = layer.view(torch.int8)
        if blocks is None:
            pages[1:].fill_(value)
        else:
            pages[blocks] = value
    return len(layers)


def _scale_weights(worker: Any, factor: float) -> int:
    """Runs in each worker of an engine: an update of weights in place, as reinforcement learning does; of the
    norms, because vLLM's CPU backend keeps packed copies of others. Powers of two leave nothing behind when
    they are taken back. Returns the number of parameters."""
    return _scale_norms(worker.model_runner.model, factor)


def _scale_norms(model: Any, factor: float) -> int:
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    for parameter in norms:
        parameter.data.mul_(factor)
    return len(norms)


def _reload_weights(worker: Any, folder: str) -> None:
    """Runs in each worker of an engine."""
    worker.model_runner.reload_weights(weights_path=folder)


def _load_weights(worker: Any, folder: str) -> int:
    """Runs in each worker of an engine: as most programs that train give weights to an engine. Norms only,
    see `_scale_weights`."""
    from safetensors.torch import load_file

    tensors = load_file(f"{folder}/model.safetensors").items()
    return len(worker.model_runner.model.load_weights((name, one) for name, one in tensors if "norm" in name))


def _tell_weights(worker: Any, revision: str | None) -> bool:
    """Runs in each worker of an engine."""
    from kvtier_vllm.updates import weights_changed

    return weights_changed(revision)


def _set_patience(worker: Any, answer_s: float, silence_s: float, start_s: float) -> None:
    """Runs in each worker of an engine: what its client and its half of the connector wait for a daemon."""
    import dataclasses

    from kvtier.session import state
    from kvtier_vllm.scheduler import matching
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    matching.ANSWER_DEADLINE_S, state.SILENCE_S = answer_s, silence_s
    side: Any = get_kv_transfer_group()
    if side._worker is not None:
        side._worker._config = dataclasses.replace(side._worker._config, load_start_deadline_s=start_s)


class Runner:
    """Carries out commands on one engine. It is stepped only inside a command, so a test decides when."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        if "weight_transfer_config" in options:
            from tests.vllm import transferred_weights

            transferred_weights.register()
        self._llm: Any = LLM(**options)
        self._engine: Any = self._llm.llm_engine
        self._core: Any = getattr(self._engine.engine_core, "engine_core", None)
        """The scheduler's side; None where it is a process of its own."""
        self._started_s: dict[str, float] = {}
        self._first_token_s: dict[str, float] = {}
        self._finished: dict[str, Answer] = {}
        self._serial = 0
        self._own_patience: tuple[float, float, float] | None = None
        self._work: Any = None
        self._taken: tuple[Any, Any] | None = None
        """Scheduler's and worker's connector, while they are switched off."""

    def handle(self, command: Command) -> Answer:
        operation = command.pop("op")
        method = getattr(self, f"do_{operation}", None)
        if method is None:
            raise ValueError(f"unknown op {operation!r}")
        answer: Answer = method(**command)
        return answer

    def do_generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: int,
        engine_timeout_s: float,
        salt: str | None = None,
        lora: list[Any] | None = None,
    ) -> Answer:
        """Runs the prompts together to their end; results in their order."""
        ids = [self.do_add(prompt, max_tokens, logprobs, salt, lora)["request"] for prompt in prompts]
        return {"results": self.do_finish(ids, engine_timeout_s)["results"]}

    def do_add(
        self,
        prompt: list[int],
        max_tokens: int,
        logprobs: int,
        salt: str | None = None,
        lora: list[Any] | None = None,
    ) -> Answer:
        """Queues one request without stepping the engine. `lora`: an adapter's name, number and folder."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._serial += 1
        request = f"r{self._serial}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        tokens: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            tokens["cache_salt"] = salt
        self._started_s[request] = time.perf_counter()
        adapter = None if lora is None else LoRARequest(*lora)
        self._engine.add_request(request, tokens, sampling, lora_request=adapter)
        return {"request": request}

    def do_load_adapter(self, lora: list[Any], in_place: bool = False) -> Answer:
        """As the API server does when it is told to load one."""
        from vllm.lora.request import LoRARequest

        return {"ok": self._engine.add_lora(LoRARequest(*lora, load_inplace=in_place))}

    def do_unload_adapter(self, number: int) -> Answer:
        return {"ok": self._engine.remove_lora(number)}

    def do_step(self, count: int = 1) -> Answer:
        """Steps the engine `count` times; says what the scheduler holds afterwards."""
        for _ in range(count):
            self._step()
        return self._scheduler_state()

    def do_finish(self, requests: list[str], engine_timeout_s: float) -> Answer:
        """Steps until the named requests are finished."""
        deadline_s = time.monotonic() + engine_timeout_s
        while not all(request in self._finished for request in requests):
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"requests not finished in {engine_timeout_s} s: {self._scheduler_state()}"
                )
            self._step()
        return {"results": [self._finished.pop(request) for request in requests]}

    def do_abort(self, requests: list[str]) -> Answer:
        self._engine.abort_request(self._internal_ids(requests), internal=True)
        return self._scheduler_state()

    def do_drain(self, engine_timeout_s: float) -> Answer:
        """Steps until the scheduler holds nothing, delayed frees included."""
        deadline_s = time.monotonic() + engine_timeout_s
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"engine not drained in {engine_timeout_s} s: {self._scheduler_state()}")
            self._step()
        return self._scheduler_state()

    def do_reset_prefix_cache(self) -> Answer:
        return {"ok": bool(self._llm.reset_prefix_cache())}

    def do_scale_weights(self, factor: float) -> Answer:
        """Changes the weights in place."""
        return {"parameters": self._llm.collective_rpc(_scale_weights, args=(factor,))}

    def do_transfer_weights(self, factor: float) -> Answer:
        """Changes the weights by vLLM's own calls for that; `weight_transfer_config` says how."""
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", kwargs={"update_info": {"factor": factor}})
        self._llm.collective_rpc("finish_weight_update")
        return {}

    def do_change_weights(self, way: str, folder: str, factor: float) -> Answer:
        """Changes the weights by a call of vLLM's: to those in a folder, which are the engine's with norms
        times a factor, or (`sleep`) to none at all, as far as vLLM does that on this processor."""
        if way == "reload_weights":
            self._llm.collective_rpc(way, kwargs={"weights_path": folder})
        elif way == "runner":
            self._llm.collective_rpc(_reload_weights, args=(folder,))
        elif way == "load_weights":
            self._llm.collective_rpc(_load_weights, args=(folder,))
        elif way == "apply_model":
            self._llm.apply_model(functools.partial(_scale_norms, factor=factor))
        elif way == "look":
            self._llm.apply_model(lambda model: len(list(model.parameters())))
        elif way == "sleep of workers":
            self._llm.collective_rpc("sleep", args=(2,))
            self._llm.collective_rpc("wake_up")
        else:
            self._llm.sleep(level=2)
            self._llm.wake_up()
        return {}

    def do_tell_weights(self, revision: str | None) -> Answer:
        """Tells kvtier that they were changed."""
        return {"told": self._llm.collective_rpc(_tell_weights, args=(revision,))}

    def do_switch_connector(self, on: bool) -> Answer:
        """Takes the connector from scheduler and worker, or gives it back, while there are no requests."""
        from vllm.distributed.kv_transfer import kv_transfer_state as worker

        halves = self._core.scheduler.connector, worker._KV_CONNECTOR_AGENT
        if on and self._taken is not None:
            (self._core.scheduler.connector, worker._KV_CONNECTOR_AGENT), self._taken = self._taken, None
        elif not on and self._taken is None:
            (self._core.scheduler.connector, worker._KV_CONNECTOR_AGENT), self._taken = (None, None), halves
        return {}

    def do_overwrite_cache(self, value: int, blocks: list[int] | None = None) -> Answer:
        """Fills KV blocks (all but the null block 0, or the named ones) with one byte: what is read
        afterwards can only have been computed or loaded again."""
        written = self._llm.collective_rpc(_overwrite_cache, args=(value, blocks))
        return {"layers": sum(written)}

    def do_patience(self, seconds: float | None) -> Answer:
        """How long the engine waits for its daemon's answers, and for copies to start; None: as long as it
        does by itself. The scheduler has to be in this process."""
        from kvtier.session import state
        from kvtier_vllm.scheduler import matching

        side = self._core.scheduler.connector._scheduler
        if self._own_patience is None:
            own = matching.ANSWER_DEADLINE_S, state.SILENCE_S, side._config.load_start_deadline_s
            self._own_patience = own
        patience = self._own_patience if seconds is None else (seconds, seconds, seconds)
        matching.ANSWER_DEADLINE_S, state.SILENCE_S, side._storer.holds._hold_s = patience
        self._llm.collective_rpc(_set_patience, args=patience)
        return {}

    def do_work(
        self, asks: list[dict[str, Any]], seed: str, tides: list[int], aborts: bool, spoil: int = 0
    ) -> Answer:
        """Begins a random workload (tests.vllm.workload_engine), without a step. The scheduler has to be in
        this process."""
        from tests.vllm.workload_engine import Work

        self._work = Work(self._engine, self._core, asks, seed, tides, aborts)
        if spoil:
            self._work.spoil(spoil)
        return {"left": self._work.left}

    def do_go_on(self, steps: int) -> Answer:
        """So many steps of the workload: how many requests are not over then, and what has been counted."""
        self._work.go_on(steps)
        left, resetting = self._work.left, self._work.resetting
        return {"left": left, "resetting": resetting, "counts": dict(self._work.counts)}

    def do_reset(self, what: str) -> Answer:
        """Has "cache" or "connector" reset as soon as the workload allows it."""
        self._work.reset(what)
        return {}

    def do_outcomes(self) -> Answer:
        """What each request of the workload came to."""
        return {"outcomes": self._work.outcomes()}

    def do_state(self) -> Answer:
        return self._scheduler_state()

    def do_evaluate(self, expression: str) -> Answer:
        """Value of a Python expression over `llm`, `core` and `scheduler`, and over the connector's `side`
        and `worker` and their clients `client` and `rank`, for a look inside that no other command offers.
        The result must be JSON. An engine whose workers are processes of their own has no `worker` here."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        names = {"llm": self._llm, "core": self._core, "scheduler": self._core.scheduler}
        connector = self._core.scheduler.connector
        if connector is not None:
            names |= {"side": connector._scheduler, "client": connector._scheduler.link.client}
            if has_kv_transfer_group():
                worker = get_kv_transfer_group()._worker
                names |= {"worker": worker, "rank": None if worker.link is None else worker.link.client}
        return {"value": eval(expression, names)}

    def _internal_ids(self, requests: list[str]) -> list[str]:
        # vLLM appends a random suffix to the id it was given.
        return [
            key
            for key in self._core.scheduler.requests
            if key.rsplit("-", 1)[0] in requests or key in requests
        ]

    def _scheduler_state(self) -> Answer:
        if self._core is None:
            return {}
        scheduler = self._core.scheduler
        return {
            "requests": {key: request.status.name for key, request in scheduler.requests.items()},
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def _step(self) -> None:
        outputs = self._engine.step()
        now_s = time.perf_counter()
        if not outputs:
            time.sleep(0.0005)  # as the engine's own loop does: lets transfers run on a small machine
        for output in outputs:
            completion = output.outputs[0]
            request = output.request_id
            if completion.token_ids:
                self._first_token_s.setdefault(request, now_s)
            if output.finished:
                started_s = self._started_s.pop(request)
                first_s = self._first_token_s.pop(request, now_s)
                self._finished[request] = {
                    "tokens": list(completion.token_ids),
                    "logprobs": [
                        {str(token): value.logprob for token, value in step.items()}
                        for step in completion.logprobs or []
                    ],
                    "num_cached_tokens": output.num_cached_tokens,
                    "ttft_s": first_s - started_s,
                    "total_s": now_s - started_s,
                    "finish_reason": completion.finish_reason,
                }


def main() -> None:
    answers = _claim_stdout()
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()

    def answer(content: Answer) -> None:
        answers.write(json.dumps(content) + "\n")

    try:
        runner = Runner(json.loads(sys.argv[1]))
    except BaseException as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    answer({"ready": True, "pid": os.getpid()})
    while True:
        command = commands.get()
        if command["op"] == "quit":
            break
        try:
            answer(runner.handle(command))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    runner._engine.engine_core.shutdown()
    answer({"stopped": True})
    answers.flush()
    os._exit(0)  # daemon threads and torch's exit handlers must not delay or fail the end


if __name__ == "__main__":
    main()
