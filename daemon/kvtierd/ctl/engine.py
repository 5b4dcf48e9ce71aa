"""`kvtierctl check-engine`: proves that a running engine stores in kvtierd and loads from it.

A prompt that nobody has sent before is sent twice, and in between the engine forgets its own prefix cache.
What it does not compute the second time can only come from kvtierd, whose counters say the same.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.v1 import admin_pb2, admin_pb2_grpc

from kvtierd.config.settings import human_size
from kvtierd.ctl.engine_http import EngineServer, HttpAnswer, HttpError, ServedModel
from kvtierd.ctl.text import count

CALL_S = 5.0
POLL_S = 0.05
SETTLED_S = 0.5
"""Stores have ended when none was counted for this long. Their number is not known, because layers with a
window keep only some blocks."""
PROMPT_TOKENS = 513
BLOCKS = 4
"""The least length of the prompt, in blocks of the group with the longest ones."""
TRIES = 3
"""How often the second request is tried. On a busy machine a load may come too late, and its tokens are
computed."""
ON_RESET = "kvtier.on_reset"
CONNECTOR_METRIC = "vllm:kvtier_loaded_tokens_total"
RESET = "/reset_prefix_cache"
SEE_LOG = "see the engine's log: its lines about kvtier begin with `kvtier:`"


class NotProvenError(Exception):
    """It could not be proved that the engine uses the cache. The text says why, and `advice` what to do."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.advice = advice


@dataclass(slots=True)
class Proof:
    """What has been found out so far. Blocks and bytes are what the daemon counted meanwhile, for all engines
    that are attached to it."""

    url: str
    proven: bool = False
    why_not: str = ""
    advice: str = ""
    model: str = ""
    engine_version: str = ""
    daemon_version: str = ""
    instances: int = 0
    """Engines that are attached to the daemon and ready."""
    prompt_tokens: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    first_s: float = 0.0
    """Seconds until the first answer."""
    second_s: float = 0.0
    """Seconds until the second answer."""
    cached_tokens: int | None = None
    """Tokens of the second request that were not computed; None if the server does not say
    (`--enable-prompt-tokens-details`)."""
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    loaded_tokens: int | None = None
    """Tokens that were loaded, by the engine's own metrics; None if it has none."""


def _check_resets_only_flush(instances: list[admin_pb2.InstanceStatus]) -> None:
    """Raises NotProvenError, before anything is done, if a reset would end an engine's sharing."""
    for instance in instances:
        settings = {each.name: each.value for session in instance.sessions for each in session.configuration}
        if settings.get(ON_RESET) == "leave":
            raise NotProvenError(
                f"a reset of its prefix cache, which this check needs, would end the sharing of "
                f"{instance.instance}: with its settings it means that its weights have changed",
                'start it with "on_reset": "keep" in kv_connector_extra_config, for this check, or for good '
                "if its weights never change in place",
            )


class EngineCheck:
    """One check of one engine. `say` is called with each line for people as soon as it is known."""

    def __init__(
        self,
        server: EngineServer,
        admin: admin_pb2_grpc.AdminStub,
        socket: Path,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.proof = Proof(server.url)
        self._server = server
        self._admin = admin
        self._socket = socket
        self._timeout_s = timeout_s
        self._say = say

    def run(self, model_name: str | None) -> Proof:
        """Runs the check. What is wrong with the engine is in the Proof, and raises nothing. Raises
        grpc.RpcError if the daemon does not answer."""
        try:
            self._prove(model_name)
            self.proof.proven = True
        except NotProvenError as error:
            self.proof.why_not, self.proof.advice = str(error), error.advice
        except HttpError as error:
            self.proof.why_not = f"the engine at {self._server.url} did not do as asked: {error}"
            self.proof.advice = "check the address, and whether the server is up and serves this model"
            if error.status in (401, 403):
                self.proof.advice = "name the server's key with --api-key, or in VLLM_API_KEY"
        return self.proof

    def _prove(self, model_name: str | None) -> None:
        status = self._status()
        self.proof.daemon_version = status.version
        self._say(f"daemon    kvtierd {status.version} (pid {status.pid}) at {self._socket}, {status.state}")
        model = self._server.model(model_name)
        self.proof.model, self.proof.engine_version = model.name, self._server.version()
        version = f", vLLM {self.proof.engine_version}" if self.proof.engine_version else ""
        self._say(f"engine    {self._server.url}, model {model.name}{version}")
        self._check_engine_can()
        instances = self._ready_instances()
        self.proof.instances = len(instances)
        self._say(f"attached  {', '.join(f'{each.instance} ({each.model})' for each in instances)}")
        _check_resets_only_flush(instances)
        prompt = self._server.prompt(model, self._prompt_tokens(model, instances))
        self._store(model, prompt)
        self._load(model, prompt)

    def _check_engine_can(self) -> None:
        if not self._server.has(RESET):
            raise NotProvenError(
                f"the engine cannot be told to forget its own prefix cache: it has no {RESET}",
                "start it with VLLM_SERVER_DEV_MODE=1 in its environment for this check, and without it in "
                "production; or restart the engine, send a prompt again that it has answered before, and "
                "compare `loaded` in `kvtierctl status` before and after",
            )
        metrics = self._server.metrics()
        if metrics and CONNECTOR_METRIC not in metrics and any(name.startswith("vllm:") for name in metrics):
            raise NotProvenError(
                "the engine runs without the kvtier connector: its metrics know nothing of it",
                "start it with --kv-transfer-config as the README says",
            )

    def _ready_instances(self) -> list[admin_pb2.InstanceStatus]:
        """Waits until an engine is ready."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            found = self._status().instances
            ready = [each for each in found if each.ready]
            if ready or time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
        if not found:
            raise NotProvenError(
                f"no engine is attached to the daemon at {self._socket}",
                'compare the socket with the engine\'s ("socket" in kv_connector_extra_config, or '
                f"KVTIER_SOCKET); if they are the same, {SEE_LOG}",
            )
        if not ready:
            names = ", ".join(
                f"{each.instance} (attached: {', '.join(s.role for s in each.sessions) or 'nobody'}, of "
                f"{count(each.world_size, 'rank')} and a scheduler)"
                for each in found
            )
            raise NotProvenError(
                f"no engine has become ready within {self._timeout_s:g} s: {names}",
                f"its namespace is known when all of its processes are attached; {SEE_LOG}",
            )
        return ready

    def _prompt_tokens(self, model: ServedModel, instances: list[admin_pb2.InstanceStatus]) -> int:
        """The length of a prompt that has a few whole blocks in each of these engines."""
        digests = {each.namespace_digest for each in instances if each.model in model.names}
        digests = digests or {each.namespace_digest for each in instances}
        asked = (admin_pb2.ListNamespacesRequest(namespace=digest) for digest in digests)
        answers = [self._admin.ListNamespaces(each, timeout=CALL_S) for each in asked]
        sizes = [each.block_tokens for answer in answers for each in answer.namespaces]
        block = math.lcm(*(size for size in sizes if size))
        tokens = max(PROMPT_TOKENS, BLOCKS * block + 1)
        if model.max_tokens:
            tokens = min(tokens, model.max_tokens - 1)
        if tokens <= block:
            raise NotProvenError(
                f"no prompt is long enough: a block has {block} tokens, and the model takes "
                f"{model.max_tokens}",
                "start the engine with a smaller --block-size, or a larger --max-model-len",
            )
        return tokens

    def _store(self, model: ServedModel, prompt: str | list[int]) -> None:
        """Sends the prompt for the first time, and waits until its blocks are stored."""
        before = self._status()
        started_s = time.monotonic()
        first = self._server.complete(model, prompt)
        self.proof.first_s = time.monotonic() - started_s
        self.proof.prompt_tokens = first.prompt_tokens
        tokens = count(first.prompt_tokens, "token")
        self._say(f"sent      a new prompt of {tokens}: answered in {self.proof.first_s:.2f} s")
        deadline_s = time.monotonic() + self._timeout_s
        changed_s = time.monotonic()
        while True:
            now = self._status()
            stored = now.counters.stored_blocks - before.counters.stored_blocks
            if stored != self.proof.stored_blocks:
                changed_s = time.monotonic()
            self.proof.stored_blocks = stored
            self.proof.stored_bytes = now.counters.stored_bytes - before.counters.stored_bytes
            if stored and time.monotonic() - changed_s > SETTLED_S:
                break
            if time.monotonic() > deadline_s:
                if stored:
                    break  # other engines store all the time
                raise self._nothing_stored(before, now)
            time.sleep(POLL_S)
        what = count(stored, "block")
        self._say(f"stored    {what}, {human_size(self.proof.stored_bytes)}")

    def _nothing_stored(
        self, before: admin_pb2.StatusResponse, now: admin_pb2.StatusResponse
    ) -> NotProvenError:
        old, new = before.counters, now.counters
        reasons = []
        if now.state != "serving":
            reasons.append(f"the daemon is {now.state}: `kvtierctl resume` takes that back")
        if new.throttled_blocks > old.throttled_blocks:
            refused = count(new.throttled_blocks - old.throttled_blocks, "block")
            reasons.append(f"the pool has no room: it refused {refused}; see `kvtierctl status`")
        if new.failed_transfers > old.failed_transfers:
            reasons.append("a transfer failed; see the daemon's log")
        advice = "; ".join(reasons) or (
            "look at the connector's settings: `store` false, `store_threshold` above 1 or "
            "`max_store_tokens` keep a prompt from being stored; and at whether another engine is attached "
            f"to this daemon instead of this one; {SEE_LOG}"
        )
        return NotProvenError(f"nothing was stored within {self._timeout_s:g} s", advice)

    def _load(self, model: ServedModel, prompt: str | list[int]) -> None:
        """Has the engine forget the prompt, and sends it again."""
        for _ in range(TRIES):
            self._reset()
            before, metrics = self._status(), self._server.metrics()
            started_s = time.monotonic()
            second = self._server.complete(model, prompt)
            self.proof.second_s = time.monotonic() - started_s
            now = self._status()
            self.proof.cached_tokens = second.cached_tokens
            self.proof.loaded_blocks = now.counters.loaded_blocks - before.counters.loaded_blocks
            self.proof.loaded_bytes = now.counters.loaded_bytes - before.counters.loaded_bytes
            self.proof.loaded_tokens = _grown(metrics, self._server.metrics())
            self._say(f"sent      the same prompt again{_cached(second)}: {self.proof.second_s:.2f} s")
            if self._is_loaded():
                break
        else:
            raise self._nothing_loaded(before, now)
        blocks = count(self.proof.loaded_blocks, "block")
        self._say(f"loaded    {blocks}, {human_size(self.proof.loaded_bytes)}, from kvtierd")

    def _reset(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not self._server.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                raise NotProvenError(
                    f"the engine did not forget its prefix cache within {self._timeout_s:g} s: requests hold "
                    "blocks of it",
                    "try again when the engine has nothing else to do",
                )
            time.sleep(POLL_S)
        self._say("reset     the engine has forgotten its own prefix cache")

    def _is_loaded(self) -> bool:
        """Whether blocks were loaded for this request. The daemon only counts loads; the engine knows for
        which request."""
        proof = self.proof
        if not proof.loaded_blocks:
            return False
        if proof.cached_tokens is not None:
            return proof.cached_tokens > 0
        if proof.loaded_tokens is not None:
            return proof.loaded_tokens > 0
        if proof.instances > 1:
            raise NotProvenError(
                f"{proof.instances} engines are attached to the daemon, and this one does not say what it "
                "has loaded",
                "start the engine with --enable-prompt-tokens-details, or without --disable-log-stats",
            )
        return True

    def _nothing_loaded(
        self, before: admin_pb2.StatusResponse, now: admin_pb2.StatusResponse
    ) -> NotProvenError:
        old, new = before.counters, now.counters
        reasons = []
        if new.integrity_failures > old.integrity_failures:
            reasons.append("blocks were refused for a wrong checksum: see `kvtierctl doctor` and the memory")
        if new.failed_transfers > old.failed_transfers:
            reasons.append("a transfer failed; see the daemon's log")
        if new.evicted_blocks > old.evicted_blocks:
            reasons.append("blocks are being evicted: the pool is too small for what is stored")
        if self.proof.loaded_blocks:
            reasons.append("what the daemon counted was loaded by another engine")
        advice = "; ".join(reasons) or (
            "look at the connector's settings: `load` false, `min_load_tokens` and `max_load_tokens` keep a "
            f"prompt from being loaded; {SEE_LOG}"
        )
        return NotProvenError(
            f"the prompt was stored, and then computed again: nothing of it was loaded in {TRIES} tries",
            advice,
        )

    def _status(self) -> admin_pb2.StatusResponse:
        return self._admin.Status(admin_pb2.StatusRequest(), timeout=CALL_S, wait_for_ready=False)


def verdict(proof: Proof) -> Iterator[str]:
    """The verdict for people, line by line."""
    if proof.proven:
        tokens = proof.cached_tokens if proof.cached_tokens is not None else proof.loaded_tokens
        what = f"{tokens:,} of {proof.prompt_tokens:,} tokens" if tokens is not None else "the prompt"
        yield f"Proven: the engine stored the prompt in kvtierd and loaded {what} instead of computing them."
        yield "It computed what fills no block, and the last block too if this hit was one of its audits."
    else:
        yield f"Not proven: {proof.why_not.rstrip('.')}."
        yield f"What to do: {proof.advice}."


def _cached(answer: HttpAnswer) -> str:
    return "" if answer.cached_tokens is None else f", {answer.cached_tokens:,} tokens of it not computed"


def _grown(before: dict[str, float] | None, now: dict[str, float] | None) -> int | None:
    if before is None or now is None or CONNECTOR_METRIC not in now:
        return None
    return round(now[CONNECTOR_METRIC] - before.get(CONNECTOR_METRIC, 0.0))
