"""What a user may set in `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.retention import SECONDS_MAX
from kvtier_engine.settings import Rules, read_settings

from kvtier_vllm.scheduler.retaining import HOST, PRIORITIES, TIERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The settings of one engine's connector, which are the same in all its processes."""

    socket: str = ""
    """The daemon's socket. If empty, KVTIER_SOCKET, else where kvtierd listens by default."""
    autostart: bool = False
    """Whether to start a kvtierd with its default settings (and KVTIER_ variables) where none answers, to try
    kvtier with nothing but this engine's own flag. The daemon runs on when the engine ends."""
    tenant: str = ""
    """The tenant; blocks are never shared between tenants."""
    salt: str = dataclasses.field(default="", repr=False)
    """Free text that must be equal for blocks to be shared."""
    salt_file: str = ""
    """The absolute path of a file that holds the salt, which nobody but its owner may write, and not
    everybody read. It is read at the engine's start, and one newline at its end does not count."""
    weights_revision: str = ""
    """The name of the weights, which must change whenever they change. If empty, it is derived from the
    files, or taken from the hub."""
    adapters: str = "refuse"
    """How engines with LoRA are treated. "refuse": nothing is cached. "files": an adapter is known by the
    content of the files that every worker has loaded, which lie in a folder of this machine, as safetensors.
    Once the files have changed, or the adapter was loaded again with other ones, its requests are not cached
    any more."""
    store: bool = True
    """Whether this engine's blocks are stored."""
    load: bool = True
    """Whether stored blocks are looked up and loaded."""
    store_tokens: str = "all"
    """With "prompt", only blocks of prompts are stored; with "all", also those of sampled tokens, with which
    the next turn of a conversation begins."""
    max_store_tokens: int = 0
    """How many tokens of a request are stored, from its beginning: blocks that end later are not. 0: no
    limit."""
    store_threshold: int = 1
    """After how many requests of this engine with the same block it is stored. With 2, blocks that nobody
    uses again are never stored, and shared ones are stored one use later."""
    priority: str = "normal"
    """With "low", the blocks that a request has made are the first to be evicted after its end, unless
    somebody uses them again; blocks that it only used are left alone. With "high", the blocks that it used
    are held for `pin_s`, or if that is 0 for `max_pin_s`."""
    pin_s: float = 0.0
    """For how many seconds after a request's end the blocks that it used are not evicted, as far as the
    daemon has room for them. 0: they are not held. It has no effect with priority "low"."""
    max_pin_s: float = 300.0
    """The longest time in seconds that a request may get by its own `pin_s`, or by priority "high"; `pin_s`,
    if that is longer. 0: requests may not ask for any."""
    ttl_s: float = 0.0
    """After how many seconds stored blocks are dropped; until then they stay on the host. 0: they are kept as
    long as there is room."""
    tiers: tuple[str, ...] = TIERS
    """The tiers in which blocks are stored and looked for: ["host", "disk"], or only ["host"]."""
    max_load_tokens: int = 0
    """How many tokens of a request are loaded, from its beginning: blocks that end later are not. 0: no
    limit."""
    min_load_tokens: int = 0
    """The fewest tokens that are loaded rather than computed. With 0, the engine does what is expected to be
    over sooner, by its own measure of its steps, loads and prefill rate. While other requests are being
    computed, a load delays its request by a step or more; an idle engine, and one that has not measured
    enough, loads everything. With any other value, only that value decides, and only `pending_wait_s` bounds
    waiting."""
    lookup_budget_ms: float = 0.5
    """How many milliseconds all lookups of one scheduler step together may wait for answers; ten times as
    many in a step in which nothing runs, and none where answers take longer. Requests beyond that ask again
    in the next step."""
    pending_wait_s: float = 2.0
    """How many seconds a request waits, in all, for blocks that are being read from a disk, or stored by
    another engine, while other requests are computed. After that it takes what there is. If the prefill rate
    is known, it waits no longer than computing the blocks would take. 0: it does not wait, and computes what
    cannot be loaded at once. Reading from a disk takes the blocks' bytes divided by the disk's bytes per
    second; a store takes until the end of the other engine's step."""
    pending_poll_s: float = 0.01
    """How many seconds a waiting request lets pass before it asks again."""
    prefill_tokens_per_s: float = 0.0
    """How many tokens of a prompt this engine computes in a second. The daemon promotes nothing from a disk
    that would take longer than computing it. 0: learned from the engine's own steps."""
    load_start_deadline_s: float = 2.0
    """How many seconds after it was released (on a GPU, after its step was enqueued) a load must have
    started. One that has not is given up, and its tokens are computed. The same holds for stores that keep a
    finished request's blocks."""
    on_reset: str = "leave"
    """What a reset of the engine's own prefix cache means. "leave": its weights may have changed, so it
    shares blocks with nobody until they are named (`kvtier_vllm.updates`). "keep": resets only flush the
    cache, and weights never change in place without being named."""
    audit_rate: float = 0.001
    """Which share of the requests that load is audited: their last block is computed as well, and compared
    with what is stored. The first hit after each attachment always is. If the two cannot be of one model,
    this engine loads and stores nothing more. 0: no audits."""
    share: str = "auto"
    """How a KV cache on a GPU is shared. "export": the daemon copies to and from it directly. "mirror": the
    engine copies blocks to and from host memory that the daemon maps, which costs it time and a thread, but
    works with every allocator. "auto": "mirror" only where "export" is not possible: the engine's allocator
    makes memory that cannot be exported, or the driver lets nobody else open it, as in some containers."""
    contiguous_blocks: bool = False
    """Whether to ask an engine on a GPU for blocks that are contiguous across layers: one large copy for each
    block instead of one for each layer. vLLM from 0.32 on keeps its own layout, with a warning, if its
    attention kernels do not support this one. It does not start if it has to split blocks for its kernels, or
    if another connector asks for another layout."""

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> ConnectorConfig:
        """Makes the settings out of `kv_connector_extra_config`, with the content of `salt_file` as `salt`.
        Raises SettingsError, which names every key and value that cannot be used."""
        given = read_settings(cls, extra_config, "kv_connector_extra_config", _RULES)
        if "tiers" in given:
            given["tiers"] = tuple(given["tiers"])
        return cls(**given)


TIERS_EXPECTED = '["host", "disk"] or ["host"]'


def are_tiers(value: object) -> bool:
    """Returns whether this names tiers to keep blocks in. The host must be one of them, because disks are
    read into it."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        return False
    return HOST in value and set(value) <= set(TIERS)


_RULES = Rules(
    most={"prefill_tokens_per_s": 1e9, "audit_rate": 1.0}
    | dict.fromkeys(("pin_s", "max_pin_s", "ttl_s"), SECONDS_MAX),
    least={"store_threshold": 1},
    choices={
        "priority": PRIORITIES,
        "adapters": ("refuse", "files"),
        "share": ("auto", "export", "mirror"),
        "store_tokens": ("all", "prompt"),
        "on_reset": ("leave", "keep"),
    },
    others={"tiers": (TIERS_EXPECTED, are_tiers)},
)
