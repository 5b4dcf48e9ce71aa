"""The connector's and the client's lines in an engine's log, all of which look like vLLM's own."""

from __future__ import annotations

import logging

from kvtier import ClientStatus
from vllm.logger import init_logger

from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.scheduler.retaining import HOST

# A child of vLLM's logger, so its handlers and format apply.
log = init_logger("vllm.kvtier")

CLIENT_LOGGER = "kvtier"


class _ToVllm(logging.Handler):
    """Hands records to vLLM's logger, as it is configured when they come."""

    def emit(self, record: logging.LogRecord) -> None:
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def adopt_client_log() -> None:
    """Makes what the kvtier client logs in this process appear in vLLM's format and at vLLM's level. Safe to
    call again."""
    client = logging.getLogger(CLIENT_LOGGER)
    if not any(isinstance(handler, _ToVllm) for handler in client.handlers):
        client.addHandler(_ToVllm())
    client.propagate = False
    client.setLevel(logging.DEBUG)


def attached(status: ClientStatus, socket: str, config: ConnectorConfig, *, again: bool) -> str:
    """Returns one line that says which daemon the engine has attached to, and what it will do with it."""
    pool = f", pool of {_size(status.pool_bytes)}" if status.pool_bytes else ""
    if status.prefix_tokens_max:
        pool += f" (room for {status.prefix_tokens_max:,} tokens)"
    return (
        f"kvtier: attached{' again' * again} to kvtierd {status.daemon_version} (pid {status.daemon_pid}) at "
        f"{socket}, namespace {status.namespace_digest}{pool}. {stores(config)}; {loads(config)}."
    )


def stores(config: ConnectorConfig) -> str:
    """Returns what an engine with these settings stores, as the beginning of a sentence."""
    if not config.store:
        return "This engine stores nothing"
    what = "prompts" if config.store_tokens == "prompt" else "prompts and outputs"
    conditions = []
    if config.max_store_tokens:
        conditions.append(f"the first {config.max_store_tokens} tokens of a request")
    if config.store_threshold > 1:
        conditions.append(f"once {config.store_threshold} requests have used them")
    if config.tiers == (HOST,):
        conditions.append("in host memory only")
    if config.ttl_s:
        conditions.append(f"for {config.ttl_s:g} s")
    return ", ".join([f"This engine stores full blocks of {what}", *conditions])


def loads(config: ConnectorConfig) -> str:
    """Returns what an engine with these settings loads, as the end of a sentence."""
    if not config.load:
        return "it loads nothing"
    limits = []
    if config.min_load_tokens:
        limits.append(f"at least {config.min_load_tokens} tokens at once")
    if config.max_load_tokens:
        limits.append(f"the first {config.max_load_tokens} tokens of a request")
    return ", ".join(["it loads what it finds", *limits])


def _size(count: int) -> str:
    """Returns a number of bytes as people write it."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"
