"""What `kvtierctl check-engine` asks an OpenAI-compatible server, in particular vLLM."""

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
from urllib.parse import SplitResult, urlsplit

ANSWER_BYTES_MAX = 64 << 20
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
IDS_WITHOUT_TOKENIZER = range(3, 250)
"""Every vocabulary has these. An engine without a tokenizer may fail at an id that its model does not
have."""
WORD_BYTES = 2
TOKENS_OF_A_WORD = 5
"""The most tokens of one word of a prompt, which is a space and four hexadecimal digits."""


class HttpError(Exception):
    """The server did not do what was asked; the text says how it answered."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; 0 if there was no answer."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    names: tuple[str, ...]
    """All names by which the model may be known to the daemon: the served name, and those of its weights."""
    max_tokens: int
    """The most tokens of prompt and output together; 0 if the server does not say."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The server's answer to one prompt."""

    prompt_tokens: int
    cached_tokens: int | None
    """Tokens of the prompt that were not computed; None if the server does not say."""


def server_of(text: str) -> str:
    """The base address of a server, from what a user writes: with or without http:// and a path below /v1.
    Raises ValueError."""
    parts: SplitResult = urlsplit(text if "//" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is no address of a server: write http://HOST:PORT")
    _ = parts.port  # raises ValueError, and says what is wrong
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


class EngineServer:
    """One server. Every call takes at most `timeout_s`, and raises HttpError."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        handlers = []
        if urlsplit(url).hostname in LOCAL_HOSTS:  # a proxy knows another host by that name
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def model(self, wanted: str | None) -> ServedModel:
        """The model with this name, or the first that is no adapter. Raises HttpError if there is none."""
        models = _json(self.get("/v1/models")).get("data") or []
        names = [str(model.get("id")) for model in models]
        for model in models:
            name, root = str(model.get("id")), str(model.get("root"))
            if name == wanted or (wanted is None and model.get("parent") is None):
                return ServedModel(
                    name, (name, root, PurePath(root).name), int(model.get("max_model_len") or 0)
                )
        raise HttpError(f"it serves no model {wanted!r}, but {', '.join(names) or 'none'}")

    def version(self) -> str:
        """The version of vLLM; empty if the server does not say."""
        try:
            return str(_json(self.get("/version")).get("version", ""))
        except HttpError:
            return ""

    def has(self, path: str) -> bool:
        """Whether the server knows this path, which takes POST. Nothing is done there."""
        try:
            self.get(path)
        except HttpError as error:
            if error.status in (404, 501):
                return False
            if error.status == 405:
                return True
            raise
        return True

    def prompt(self, model: ServedModel, tokens: int) -> str | list[int]:
        """A prompt of about so many tokens that nobody has sent before. It has exactly as many as token ids,
        or is a text that is shorter if the server does not tokenize for clients."""
        ids: list[int] = []
        text = ""
        try:
            while len(ids) < tokens:  # in parts, so that none is longer than the model takes
                text = " ".join(secrets.token_hex(WORD_BYTES) for _ in range(tokens // TOKENS_OF_A_WORD or 1))
                body = {"model": model.name, "prompt": text, "add_special_tokens": not ids}
                ids += map(int, self.post("/tokenize", body)["tokens"])
        except (KeyError, TypeError, ValueError):
            return text
        except HttpError as error:
            if error.status == 400 and "okenizer" in str(error):
                return [secrets.choice(IDS_WITHOUT_TOKENIZER) for _ in range(tokens)]
            if error.status in (404, 405, 501):
                return text
            raise
        return ids[:tokens]

    def complete(self, model: ServedModel, prompt: str | list[int]) -> HttpAnswer:
        """Sends a prompt, and has the server compute one token after it."""
        body = {"model": model.name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = self.post("/v1/completions", body).get("usage") or {}
        details = usage.get("prompt_tokens_details")
        cached = None if details is None else int(details.get("cached_tokens") or 0)
        return HttpAnswer(int(usage.get("prompt_tokens") or 0), cached)

    def reset_prefix_cache(self) -> bool:
        """Has the engine forget its own prefix cache, but not what the connector has stored. False if
        requests or copies still hold blocks."""
        return self.post("/reset_prefix_cache", None).get("success", True) is not False

    def metrics(self) -> dict[str, float] | None:
        """Sums of the samples of each metric by its name; None if the server has no metrics."""
        try:
            lines = self.get("/metrics").decode(errors="replace").splitlines()
        except HttpError:
            return None
        sums: dict[str, float] = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            if name and not name.startswith("#"):
                try:
                    key = name.partition("{")[0]
                    sums[key] = sums.get(key, 0.0) + float(value)
                except ValueError:
                    continue  # of no form that we know
        return sums

    def get(self, path: str) -> bytes:
        """The body of the answer."""
        return self._call(path, None, "GET")

    def post(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The JSON object of the answer; empty if the answer is empty."""
        data = b"" if body is None else json.dumps(body).encode()
        return _json(self._call(path, data, "POST"))

    def _call(self, path: str, data: bytes | None, method: str) -> bytes:
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                body: bytes = answer.read(ANSWER_BYTES_MAX)
                return body
        except urllib.error.HTTPError as error:
            with error:
                told = _message(error.read(ANSWER_BYTES_MAX))
            raise HttpError(f"{method} {path}: {error.code} {told or error.reason}", error.code) from error
        except urllib.error.URLError as error:
            raise HttpError(f"{method} {path}: {error.reason}") from error
        except OSError as error:  # a timeout while reading, or a connection that broke off
            raise HttpError(f"{method} {path}: {error or type(error).__name__}") from error


def _json(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HttpError(f"it answers with something else than a JSON object: {body[:80]!r}")
    return found


def _message(body: bytes) -> str:
    """The server's own words in a refusal."""
    try:
        found = json.loads(body)
        return str(found["error"]["message"] if "error" in found else found["detail"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip()
