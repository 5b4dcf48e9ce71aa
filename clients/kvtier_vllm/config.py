"""What a user may set in `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.connection.address import resolve
from kvtier.errors import KvtierError
from kvtier.retention import SECONDS_MAX

from kvtier_vllm.scheduler.retaining import HOST, PRIORITIES, TIERS


class ConnectorConfigError(ValueError):
    """A setting that cannot be used; the message names it, what was found, and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Settings of one engine's connector, the same in all its processes."""

    socket: str = ""
    """The daemon's socket. Empty: KVTIER_SOCKET, else where kvtierd listens by default."""
    autostart: bool = False
    """Start a kvtierd with its default settings (and KVTIER_ variables) where none answers: to try kvtier
    with nothing but this engine's own flag. It goes on when the engine ends."""
    tenant: str = ""
    """Blocks are never shared between tenants."""
    salt: str = ""
    """Free text that must be equal for blocks to be shared."""
    weights_revision: str = ""
    """Name of the weights, changed whenever they change. Empty: found out, from the files or the hub."""
    adapters: str = "refuse"
    """With LoRA. "refuse": nothing is cached. "files": an adapter is known by the content of the files that
    every worker has loaded, which lie in a folder of this machine, as safetensors. Once they have changed, or
    the adapter was loaded again with others, its requests are not cached any more."""
    store: bool = True
    """Whether this engine's blocks are stored."""
    load: bool = True
    """Whether stored blocks are looked up and loaded."""
    store_tokens: str = "all"
    """"prompt": only blocks of prompts are stored; "all": those of what is sampled as well, which a next turn
    of a conversation begins with."""
    max_store_tokens: int = 0
    """Of a request, counted from its beginning: blocks that end later are not stored. 0: all may be."""
    store_threshold: int = 1
    """A block is stored when so many requests of this engine have had it: with 2, what nobody uses again is
    never stored, and what is shared is stored one use later."""
    priority: str = "normal"
    """"low": when a request ends, the blocks that it has made are the first to be evicted, unless somebody
    uses them again; what it has only used is not. "high": what it has used is held for `pin_s`, or else for
    `max_pin_s`."""
    pin_s: float = 0.0
    """For how long what a request has used is not evicted after its end, as far as the daemon has room for
    that. 0: it is not held. Not with priority "low"."""
    max_pin_s: float = 300.0
    """The most that a request may ask for in its own `pin_s`, or by priority "high"; or `pin_s`, if that is
    more. 0: requests may not."""
    ttl_s: float = 0.0
    """Blocks are dropped so long after they were stored, and stay on the host until then. 0: they are kept as
    long as there is room."""
    tiers: tuple[str, ...] = TIERS
    """Where blocks are stored and looked for: ["host", "disk"], or ["host"] alone."""
    max_load_tokens: int = 0
    """Of a request, counted from its beginning: blocks that end later are not loaded. 0: all may be."""
    min_load_tokens: int = 0
    """Fewer tokens than these are computed rather than loaded. 0: that is done which is expected to be over
    sooner, by the engine's own measure of its steps, loads and prefill rate. While other requests are being
    computed a load costs its request a step or more; an idle engine, and one that has not measured enough,
    loads everything. Any other value alone decides, and then `pending_wait_s` alone bounds waiting."""
    lookup_budget_ms: float = 0.5
    """How long all lookups of one scheduler step together may wait for answers. Requests beyond it ask again
    in the next step."""
    pending_wait_s: float = 2.0
    """How long a request waits, in all, for blocks that are on their way up from a disk, or that another
    engine is storing; others are computed meanwhile. After that it takes what there is. It waits no longer
    than computing them would take, as far as the prefill rate is known. 0: it does not wait,
    and computes what cannot be loaded at once. A disk's promotion takes its bytes divided by what the disk
    reads in a second; a store takes until the end of the other engine's step."""
    pending_poll_s: float = 0.01
    """A waiting request asks no more often than this whether they have come."""
    prefill_tokens_per_s: float = 0.0
    """Tokens of a prompt that this engine computes in a second: the daemon promotes nothing from a disk that
    takes longer than computing it. 0: learned from the engine's own steps."""
    load_start_deadline_s: float = 2.0
    """A load that has not started this long after it was let go (on a GPU: after its step was enqueued) is
    given up, and its tokens are computed. The same goes for stores that keep a finished request's blocks."""
    on_reset: str = "leave"
    """What a reset of the engine's own prefix cache means. "leave": its weights may be others from now on, so
    that it shares with nobody any more, until they are named (`kvtier_vllm.updates`). "keep": resets only
    flush the cache, and weights never change in place without being named."""
    audit_rate: float = 0.001
    """Of requests that load, the share of which the last block is computed as well and compared with what is
    stored; the first hit after each attachment is one of them. If the two are not of one model, this engine
    loads and stores nothing more. 0: no audits."""
    share: str = "auto"
    """How a KV cache on a GPU is shared. "export": the daemon copies to and from it directly. "mirror": the
    engine copies blocks to and from host memory that the daemon maps, which costs it time and a thread, and
    works with every allocator. "auto": export, and mirror only where the engine's allocator makes memory that
    cannot be exported."""
    contiguous_blocks: bool = False
    """Ask the engine, on a GPU, for blocks that are contiguous across layers: one large copy for each instead
    of one for each layer. vLLM from 0.32 on keeps its own layout, with a warning, where the attention kernels
    know no such one; it does not start where it has to split blocks for its kernels, or where another
    connector asks for another layout."""

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> ConnectorConfig:
        """Raises ConnectorConfigError, which tells every key and value that cannot be used."""
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        wrong = [_mistake(name, value, fields) for name, value in extra_config.items()]
        given = dict(extra_config)
        if not any(wrong):
            try:
                resolve(given.get("socket") or None)
            except KvtierError as error:
                wrong.append(f"socket={given.get('socket', '')!r}: {error.message}")
        told = [f"kv_connector_extra_config: {mistake}" for mistake in wrong if mistake]
        if told:
            raise ConnectorConfigError("; ".join(told))
        if "tiers" in given:
            given["tiers"] = tuple(given["tiers"])
        return cls(**given)


TIERS_EXPECTED = '["host", "disk"] or ["host"]'
_MOST = {"prefill_tokens_per_s": 1e9, "audit_rate": 1.0} | dict.fromkeys(
    ("pin_s", "max_pin_s", "ttl_s"), SECONDS_MAX
)
_LEAST = {"store_threshold": 1}
_CHOICES = {
    "priority": PRIORITIES,
    "adapters": ("refuse", "files"),
    "share": ("auto", "export", "mirror"),
    "store_tokens": ("all", "prompt"),
    "on_reset": ("leave", "keep"),
}


def _mistake(name: str, value: object, fields: Mapping[str, object]) -> str:
    """What is wrong with a setting, and what to write; empty if nothing is."""
    if name not in fields:
        nearest = max(fields, key=lambda known: difflib.SequenceMatcher(None, known, name.lower()).ratio())
        return f"unknown setting {name!r}; the nearest one is {nearest!r} (given: {value!r})"
    default = fields[name]
    if isinstance(default, bool):
        expected, good = "true or false", isinstance(value, bool)
    elif name == "tiers":
        expected, good = TIERS_EXPECTED, are_tiers(value)
    elif name in _CHOICES:
        expected, good = f"one of {', '.join(_CHOICES[name])}", value in _CHOICES[name]
    elif isinstance(default, str):
        expected, good = "text", isinstance(value, str)
    elif isinstance(default, int):
        least = _LEAST.get(name, 0)
        expected = f"a whole number, at least {least}"
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    else:
        expected, most = "a number that is not negative", _MOST.get(name, math.inf)
        if name in _MOST:
            expected += f", and at most {most:g}"
        good = is_number(value, most)
    return "" if good else f"{name}={value!r}: write {expected}"


def is_number(value: object, most: float = math.inf) -> bool:
    """Whether it is a number that is not negative, and has an end."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 <= value <= most and value < math.inf  # NaN is not


def are_tiers(value: object) -> bool:
    """Whether it names tiers to keep blocks in. The host is always one of them: it is what disks are read
    into."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        return False
    return HOST in value and set(value) <= set(TIERS)
