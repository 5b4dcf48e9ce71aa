"""A vLLM engine whose scheduler and workers are processes of their own; prints one JSON line.

Started as `python -m tests.vllm.separate_processes OPTIONS_JSON PROMPT_JSON`: answers the prompt cold, then
from the engine's own cache, then after that cache was reset. The last one again and again, until as much of
it was loaded: on a busy machine a store may end late, and an engine takes its daemon for silent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.vllm.engine import EngineOptions

RUN_S = 400.0


def run_in_processes(options: EngineOptions, tokens: Sequence[int], log: Path) -> dict[str, Any]:
    """Its answers, "cold", "hit" and "restored", to a prompt. Nothing of it is left afterwards."""
    from tests.vllm.engine import REPOSITORY

    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.vllm.separate_processes"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, json.dumps(options.llm_arguments()), json.dumps(list(tokens))],
            cwd=REPOSITORY,
            env=os.environ | environment | options.environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            line, _ = process.communicate(timeout=RUN_S)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # all of it ended before
    assert line, log.read_text()[-4000:]
    results: dict[str, Any] = json.loads(line)
    return results


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs on stdout
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM, SamplingParams

    llm: Any = LLM(**json.loads(sys.argv[1]))
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=5)

    def generate() -> dict[str, Any]:
        [output] = llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, sampling, use_tqdm=False)
        [completion] = output.outputs
        logprobs = [{str(k): v.logprob for k, v in step.items()} for step in completion.logprobs]
        return {
            "tokens": list(completion.token_ids),
            "logprobs": logprobs,
            "cached": output.num_cached_tokens,
        }

    results = {"cold": generate(), "hit": generate()}
    deadline_s = time.monotonic() + 60
    while True:
        while not llm.reset_prefix_cache():  # its blocks are held while they are stored
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        results["restored"] = generate()
        if results["restored"]["cached"] == results["hit"]["cached"] or time.monotonic() > deadline_s:
            break
    answers.write(json.dumps(results) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
