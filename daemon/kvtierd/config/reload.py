"""Which settings of a running daemon can change, and what becomes of the others."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtierd.config import daemon as configuration
from kvtierd.config import settings
from kvtierd.config.daemon import Config

LIVE = (
    "server.drain_s",
    "server.session_silence_s",
    "pool.policy",
    "integrity.sample_bytes_per_s",
    "disk.write_mode",
    "disk.write_bytes_per_s",
    "disk.writes_per_day",
    "disk.slow_deadline_s",
    "disk.errors_max",
    "disk.probe_after_s",
    "disk.recompute_if_faster",
    "store.write_mode",
    "store.write_bytes_per_s",
    "store.errors_max",
    "store.probe_after_s",
    "store.recompute_if_faster",
    "log.level",
)
"""The settings that can change while the daemon runs. All others are told to clients or workers when they
start, or decide how memory is laid out."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting whose value has changed."""

    key: str
    before: str
    after: str
    """Both values are written as `kvtierd config show` writes them."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The result of reading the configuration again."""

    applied: tuple[Change, ...]
    """The changes that are in force now."""
    needs_restart: tuple[Change, ...]
    """The changes that wait for a restart: their values `before` are still in force."""
    config: Config
    """The configuration that is in force."""


def compare(running: Config, read: Config) -> Reloaded:
    """Compares a configuration that was read again with the running one, and takes over what can change
    live."""
    applied, needs_restart = [], []
    sections: dict[str, dict[str, Any]] = {}
    for item in settings.declared(Config):
        before = getattr(getattr(running, item.section), item.name)
        after = getattr(getattr(read, item.section), item.name)
        if before == after:
            continue
        change = Change(item.key, configuration.as_toml(item, before), configuration.as_toml(item, after))
        if item.key in LIVE:
            applied.append(change)
            sections.setdefault(item.section, {})[item.name] = after
        else:
            needs_restart.append(change)
    config = dataclasses.replace(
        running,
        **{
            section: dataclasses.replace(getattr(running, section), **values)
            for section, values in sections.items()
        },
    )
    return Reloaded(tuple(applied), tuple(needs_restart), config)


Reload = Callable[[], Reloaded]
"""Reads the configuration again and takes over what it can. Raises ConfigError, and then nothing has
changed."""
