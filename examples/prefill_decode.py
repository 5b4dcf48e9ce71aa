"""A small proxy: prompts are computed by some vLLM engines, and answered by others, through one kvtier.

    python prefill_decode.py --listen 127.0.0.1:8000 --prefill http://a:8100 --decode http://b:8200

Each completion goes to an engine of the first kind with one token to generate, which computes the prompt and
stores it, and then to one of the second kind, which loads it and answers. Both use the same `kvtierd`, or
daemons that share a store. A prompt that cannot be computed ahead is computed by the engine that answers, so
what fails ahead costs time, and no request. Everything else goes to an engine that answers.

It needs aiohttp, which vLLM installs. It is an example: it knows neither load nor cache of the engines, and
takes them in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "stream": False}
ONE_TOKEN_TOO = {"max_completion_tokens": 1, "min_tokens": 0, "n": 1}
"""What is asked of an engine that computes a prompt ahead; the second, where the request has it."""
LEFT_OUT = ("stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "best_of", "use_beam_search")
"""What makes no sense there, or costs time."""
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"}
PREFILL_TIMEOUT_S = 60.0
BODY_BYTES_MAX = 64 << 20
NOT_AHEAD = "the prompt is computed where it is answered"
log = logging.getLogger("prefill_decode")


def ahead(body: dict[str, Any]) -> dict[str, Any]:
    """The request that has a prompt computed, and as little else as possible."""
    kept = {name: value for name, value in body.items() if name not in LEFT_OUT}
    return kept | ONE_TOKEN | {name: value for name, value in ONE_TOKEN_TOO.items() if name in body}


class Proxy:
    """Sends requests on."""

    def __init__(self, prefill: list[str], decode: list[str], timeout_s: float) -> None:
        """`prefill`, `decode`: URLs of engines, one at least of each. `timeout_s`: how long a prompt may be
        computed ahead."""
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._timeout = ClientTimeout(total=timeout_s)
        self._session: ClientSession | None = None

    async def session(self, app: web.Application) -> Any:
        """Keeps connections open as long as the proxy runs."""
        async with ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request."""
        body = await request.read()
        if request.method == "POST" and request.path in COMPLETIONS:
            await self._compute_ahead(request, body)
        return await self._answer(request, body)

    async def _compute_ahead(self, request: web.Request, body: bytes) -> None:
        assert self._session is not None
        url, began_s = next(self._prefill) + request.path_qs, time.monotonic()
        try:
            asked = ahead(json.loads(body))
            headers = _headers(request)
            async with self._session.post(url, json=asked, headers=headers, timeout=self._timeout) as reply:
                await reply.read()
                if reply.status != web.HTTPOk.status_code:
                    log.warning(
                        "%s answers %d: the prompt is computed where it is answered", url, reply.status
                    )
        except (ClientError, TimeoutError, ValueError, AttributeError) as error:
            log.warning("%s: %r: %s", url, error, NOT_AHEAD)
            return
        log.info("computed ahead in %.3f s", time.monotonic() - began_s)

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        url = next(self._decode) + request.path_qs
        try:
            async with self._session.request(
                request.method, url, data=body, headers=_headers(request)
            ) as reply:
                answer = web.StreamResponse(status=reply.status)
                for name, value in reply.headers.items():
                    if name.lower() not in HOP_BY_HOP:
                        answer.headers[name] = value
                await answer.prepare(request)
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except ClientError as error:
            raise web.HTTPBadGateway(text=f"{url}: {error!r}") from None


def _headers(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts are computed here and answered there.")
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="may be repeated")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="may be repeated")
    parser.add_argument("--prefill-timeout-s", type=float, default=PREFILL_TIMEOUT_S, metavar="SECONDS")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    prefill, decode = ([url.rstrip("/") for url in kind] for kind in (arguments.prefill, arguments.decode))
    proxy = Proxy(prefill, decode, arguments.prefill_timeout_s)
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.cleanup_ctx.append(proxy.session)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    host, _, port = arguments.listen.rpartition(":")
    web.run_app(app, host=host, port=int(port), print=None)


if __name__ == "__main__":
    main()
