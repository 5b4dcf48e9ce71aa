"""What a user may set in `linker_extra_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.retention import SECONDS_MAX
from kvtier_engine.settings import Rules, read_settings

WHERE = "linker_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkerConfig:
    """The settings of one engine's linker, which are the same in all its processes."""

    socket: str = ""
    """The daemon's socket. If empty, KVTIER_SOCKET, else where kvtierd listens by default."""
    autostart: bool = False
    """Whether to start a kvtierd with its default settings (and KVTIER_ variables) where none answers. The
    daemon runs on when the engine ends."""
    tenant: str = ""
    """The tenant; blocks are never shared between tenants."""
    salt: str = dataclasses.field(default="", repr=False)
    """Free text that must be equal for blocks to be shared."""
    salt_file: str = ""
    """The absolute path of a file that holds the salt, which nobody but its owner may write, and not
    everybody read. It is read at the engine's start."""
    weights_revision: str = ""
    """The name of the weights, which must change whenever they change. If empty, it is derived from the
    files, or taken from the hub."""
    store: bool = True
    """Whether this engine's pages are stored."""
    load: bool = True
    """Whether stored pages are looked up and loaded."""
    load_deadline_s: float = 2.0
    """How many seconds a request's load may take. What has not come by then is computed."""
    max_pin_s: float = 300.0
    """The longest time in seconds for which a request's KV hints may have its pages held. 0: not at all."""
    staging_mib: int = 256
    """How much memory in MiB each rank has for pages on their way. Half of it is for loads alone."""

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> LinkerConfig:
        """Makes the settings out of `linker_extra_config`, with the content of `salt_file` as `salt`. Raises
        SettingsError, which names every key and value that cannot be used."""
        return cls(**read_settings(cls, extra_config or {}, WHERE, RULES))


RULES = Rules(least={"staging_mib": 1}, most={"load_deadline_s": 600.0, "max_pin_s": SECONDS_MAX})
