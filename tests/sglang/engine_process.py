"""A real SGLang in a process of its own: python engine_process.py OPTIONS, which are JSON.

Reads requests from standard input, a JSON object a line, and answers each on standard output, in the order in
which they end. Standard error has SGLang's log.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import time
from typing import Any
from unittest import mock

TOP = 3
"""Log probabilities of each token: what is likeliest, so that the second one tells how near a tie was."""


class Requests:
    """Requests to one engine, side by side."""

    def __init__(self, engine: Any, answers: Any) -> None:
        self._engine = engine
        self._answers = answers

    async def perform(self, request: dict[str, Any]) -> None:
        """Performs one request, and answers it, whatever happens."""
        try:
            answer = await getattr(self, f"_{request['op']}")(request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
        self._answers.flush()

    async def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["name"]
        found: dict[str, Any] = {}
        began_s, ttft_s = time.perf_counter(), 0.0
        aborting = None
        if request["abort_after_s"] is not None:
            aborting = asyncio.ensure_future(self._abort_later(name, request["abort_after_s"]))
        stream = await self._engine.async_generate(
            input_ids=request["prompt"],
            sampling_params={
                "temperature": 0,
                "max_new_tokens": request["max_tokens"],
                "ignore_eos": True,
            },
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=TOP,
            rid=name,
            cache_salt=request["salt"] or None,
            kv_hints=request["hints"],
            stream=True,
        )
        try:
            async for part in stream:
                ttft_s = ttft_s or time.perf_counter() - began_s
                found = part
        finally:
            if aborting is not None:
                aborting.cancel()
        meta = found.get("meta_info", {})
        reason = meta.get("finish_reason") or {}
        return {
            "tokens": found.get("output_ids", []),
            "logprobs": [
                {str(token): value for value, token, *_ in each}
                for each in meta.get("output_top_logprobs", [])
            ],
            "reason": reason.get("type", "none"),
            "message": reason.get("message", ""),
            "cached": meta.get("cached_tokens_details"),
            "ttft_s": ttft_s,
            "hinted": meta.get("kvtier_kv_hints"),
        }

    async def _abort_later(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._engine.tokenizer_manager.abort_request(rid=name)

    async def _flush(self, request: dict[str, Any]) -> dict[str, Any]:
        done = await self._engine.tokenizer_manager.flush_cache()
        return {"success": bool(done.success)}

    async def _state(self, request: dict[str, Any]) -> dict[str, Any]:
        states = await self._engine.tokenizer_manager.get_internal_state()
        return {"state": json.loads(json.dumps(states, default=str))}


async def serve(engine: Any, answers: Any) -> None:
    """Serves until standard input ends."""
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    requests = Requests(engine, answers)
    under_way = set()
    while line := await reader.readline():
        task = asyncio.ensure_future(requests.perform(json.loads(line)))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    answers.write(json.dumps({"id": -1, "ready": True}) + "\n")
    answers.flush()
    try:
        engine.loop.run_until_complete(serve(engine, answers))
    finally:
        engine.shutdown()


def attend_over_latents() -> None:
    """Has models with latent vectors always attend over these. SGLang would compute the beginning of a prompt
    with full heads instead, which its attention in plain PyTorch, the only one on most CPUs, cannot do."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)


def inject(failing_rank: int | None = None, first_media: int | None = None) -> None:
    """Changes what this process will do.

    failing_rank: the rank that finds no memory when its linker starts.
    first_media: from this token on, tokens count as parts of images.
    """
    if failing_rank is None and first_media is None:
        return  # an import of the linker takes seconds
    import torch
    from kvtier_sglang import matching, staging

    allocate = staging.Staging.__init__

    def allocate_or_fail(*arguments: Any) -> None:
        if torch.distributed.get_rank() == failing_rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*arguments)

    if failing_rank is not None:
        mock.patch.object(staging.Staging, "__init__", allocate_or_fail).start()
    if first_media is not None:
        mock.patch.object(matching, "MM_PAD_SHIFT_VALUE", first_media).start()


if __name__ == "__main__":
    main()
else:  # in each process of the engine, which begins with an import of this file
    attend_over_latents()
    inject(**json.loads(os.environ["ENGINE_TEST_INJECTED"]))
