"""Two real vLLM engines, one after the other: the second one loads the prefix that the first one computed.

Start a daemon with `kvtierd serve`, then run this program in an environment that has vLLM and `kvtierctl`
(`make setup` makes one, with vLLM's build for the CPU; no GPU is needed). The model is a tiny Llama with
random weights, which is written on the spot, so nothing is downloaded.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT_TOKENS = 1_000
BLOCK_TOKENS = 32
KV_TRANSFER_CONFIG = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    # Two settings that no real model needs. This one is so small that it computes the prefix sooner than it
    # could load it; and an audit would compute the last block of the first hit.
    "kv_connector_extra_config": {"min_load_tokens": 1, "audit_rate": 0},
}
REPOSITORY = Path(__file__).resolve().parents[1]


def status():
    """What `kvtierctl status` says of the daemon."""
    command = [str(Path(sys.executable).with_name("kvtierctl")), "status", "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=30).stdout)


def wait_until(reached, what):
    """Polls the daemon's status."""
    deadline_s = time.monotonic() + 60
    while not reached(status()):
        if time.monotonic() > deadline_s:
            sys.exit(f"waited a minute for {what}; see what the engine logged")
        time.sleep(0.1)


def is_attached(status):
    """Whether an engine has attached with its memory and its scheduler."""
    return any(
        instance.get("ready") and any("scheduler" in each["role"] for each in instance.get("sessions", ()))
        for instance in status.get("instances", ())
    )


def run_engine(model, answers):
    """One engine, in a process of its own: it answers one prompt, and ends."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2_048,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=256,
        enable_prefix_caching=True,
        kv_transfer_config=KV_TRANSFER_CONFIG,
    )
    # An engine attaches in the background, and computes everything until it has. Here we want to see a hit.
    wait_until(is_attached, "the engine to attach")
    prompt = [7 * position * position % 1_000 for position in range(PROMPT_TOKENS)]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    [request] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    # Stores are asynchronous: let the last copy end before this process does.
    wait_until(lambda status: not int(status.get("transfers_active", 0)), "the stores to end")
    answers.put((request.num_cached_tokens or 0, list(request.outputs[0].token_ids)))


def main():
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        subprocess.run([sys.executable, "-m", "tools.tiny_llama", model], cwd=REPOSITORY, check=True)
        context = multiprocessing.get_context("spawn")
        for name in ("first", "second"):
            queue = context.Queue()
            engine = context.Process(target=run_engine, args=(model, queue))
            engine.start()
            try:
                loaded, tokens = queue.get(timeout=300)
            finally:
                engine.join(60)
                engine.kill()
            answers.append(tokens)
            print(f"{name} engine: {loaded} of {PROMPT_TOKENS} prompt tokens came from the cache")
    print(f"both engines gave the same answer: {answers[0] == answers[1]}")


if __name__ == "__main__":
    main()
