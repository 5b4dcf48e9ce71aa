"""A vLLM engine whose scheduler and workers are processes of their own; prints one JSON line.

Started as `python -m tests.vllm.separate_processes OPTIONS_JSON PROMPT_JSON`: answers the prompt cold, then
from the engine's own cache, then after that cache was reset. The last one again and again, until as much of
it was loaded: on a busy machine a store may end late, and an engine takes its daemon for silent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


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
