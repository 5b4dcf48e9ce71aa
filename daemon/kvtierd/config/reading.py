"""Combines what was given in the file, in the environment and on the command line.

Nothing here raises for a mistake: each is added to a list, so that all of them can be reported at once.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtierd.config import settings as s
from kvtierd.config.nearest import nearest, nearest_keys, nearest_sections
from kvtierd.config.settings import ConfigError, Given, Setting

CONFIG_VARIABLE = "KVTIER_CONFIG"
NOT_SETTINGS = frozenset(
    {
        # Another library of the CUDA driver, for all that copy: engines, the daemon and its workers.
        "KVTIER_CUDA_LIBRARY",
        # Whom clients, which may have been given the same environment, take for the daemon.
        "KVTIER_DAEMON_USER",
        # How a checkout is built, and where its traces are.
        "KVTIER_VENV",
        "KVTIER_VLLM_VERSION",
        "KVTIER_TRACES",
        # Tests, and the hooks by which they make faults.
        "KVTIER_AUDITS_LONG",
        "KVTIER_AUTOSTART_WAYS",
        "KVTIER_DISK_FAULTS",
        "KVTIER_FUZZ_SECONDS",
        "KVTIER_GPU_KILLS",
        "KVTIER_GPU_RECORD",
        "KVTIER_GPU_SCRATCH",
        "KVTIER_GPU_TEST_DEVICE",
        "KVTIER_LENGTH",
        "KVTIER_PYTHON",
        "KVTIER_REQUIRE_VLLM",
        "KVTIER_RESUME",
        "KVTIER_SEED",
        "KVTIER_SUITE_MODEL",
        "KVTIER_SUITE_SOCKET",
        "KVTIER_TEST_BLIND_TO",
        "KVTIER_TEST_CLOCK",
        "KVTIER_TEST_RUN",
        "KVTIER_TEST_WORKER_FAULT",
        "KVTIER_WORKLOAD",
    }
)
"""Variables that may be in a daemon's environment and are no settings of it."""
_FOR_PEOPLE = (CONFIG_VARIABLE, "KVTIER_CUDA_LIBRARY", "KVTIER_DAEMON_USER")
"""Variables that are suggested, besides the settings, when somebody has misspelt a name."""
_SERVICE_LINK = re.compile(
    r"KVTIER_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
)
_SERVICE_LINK_PORT = re.compile(r"KVTIER_(\w+_)?PORT(_\d+_(TCP|UDP|SCTP))?")


class Reading:
    """What was given for a configuration class, source by source, and what is wrong with it."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._known = {item.key: item for item in s.declared(cls)}
        self.given: dict[str, Given] = {}
        """The values that were given, by key. A source that is read later replaces values of earlier ones."""
        self.errors: list[ConfigError] = []
        self.incomplete = False
        """Whether a source could not be read at all, so that a missing setting may have been in it."""
        self._broken: set[str] = set()

    # --- sources ---

    def read_file(self, file: Path, source: str) -> None:
        """Reads a TOML file; `source` says what named the file."""
        try:
            tables = tomllib.loads(file.read_text())
        except (OSError, UnicodeDecodeError, ValueError) as error:
            what = (
                f"is not valid TOML: {error}"
                if isinstance(error, tomllib.TOMLDecodeError)
                else f"cannot be read: {error}; name a readable TOML file"
            )
            self.errors.append(ConfigError("config", str(file), what, source=source))
            self.incomplete = True
            return
        for section, table in tables.items():
            self._read_section(section, table, str(file))

    def _read_section(self, section: str, table: object, source: str) -> None:
        known = {item.section for item in self._known.values()}
        if section in known and not isinstance(table, dict):
            message = f"is a section: write [{section}] and its settings below"
            self.errors.append(ConfigError(section, table, message, source=source))
        elif section in known and isinstance(table, dict):
            for name, raw in table.items():
                key = f"{section}.{name}"
                if key in self._known:
                    self._take(self._known[key], [Given(raw, source)])
                else:
                    self._unknown_key(key, raw, source)
        elif isinstance(table, dict):
            near = nearest_sections(section, list(table), self._known)
            self._unknown(section, table, source, "section", near)
            for name, raw in table.items():
                if all(f"{each}.{name}" not in self._known for each in near):
                    self._unknown_key(f"{section}.{name}", raw, source)
        else:
            self._unknown_key(section, table, source)

    def read_environment(self, environ: Mapping[str, str]) -> None:
        """Reads variables. Every one that begins with our prefix is a setting, or one of NOT_SETTINGS, or a
        mistake."""
        for item in self._known.values():
            named = [Given(environ[env], f"environment {env}") for env in item.envs if env in environ]
            self._take(item, named, in_a_shell=True)
        by_env = {env: item for item in self._known.values() for env in item.envs}
        offered = [*by_env, *_FOR_PEOPLE]
        for name, raw in environ.items():
            if not name.startswith(s.ENV_PREFIX) or name in by_env:
                continue
            if name in NOT_SETTINGS or name == CONFIG_VARIABLE or _is_service_link(name, raw):
                continue
            self._unknown(name, raw, "the environment", "variable", [nearest(name, offered)])

    def read_flags(self, flags: Mapping[str, object]) -> None:
        """Reads flags, each named by its key (`pool.size`) or by the flag itself (`--pool-size`)."""
        for item in self._known.values():
            named = [Given(flags[flag], flag) for flag in item.flags if flag in flags]
            if not named and item.key in flags:
                named = [Given(flags[item.key], item.flags[-1])]
            self._take(item, named, in_a_shell=True)

    def read_leftovers(self, arguments: Iterable[str]) -> None:
        """Notes each argument of a command line that is no known flag as a mistake."""
        offered = [*(flag for _, flag in all_flags(self._cls)), "--config"]
        rest = list(arguments)
        while rest:
            name, equals, raw = rest.pop(0).partition("=")
            if not name.startswith("-"):
                message = "is not understood: settings are flags, such as --pool-size 64GiB"
                self.errors.append(ConfigError("argument", name + equals + raw, message, usage=True))
                continue
            if not equals and rest and not rest[0].startswith("-"):
                raw = rest.pop(0)
            self._unknown(name, raw, "the command line", "flag", [nearest(name, offered)], usage=True)

    # --- values ---

    def build(self) -> dict[str, Any]:
        """Parses what was given. Returns the sections, ready for `cls(**sections)`. Settings that were not
        given, or cannot be parsed, keep their defaults."""
        values: dict[str, dict[str, Any]] = {section: {} for section, _ in s.sections(self._cls)}
        for item in self._known.values():
            if (value := self.given.get(item.key)) is not None:
                try:
                    values[item.section][item.name] = item.parse(value.raw)
                except ValueError as error:
                    self.errors.append(ConfigError(item.key, value.raw, str(error), source=value.source))
                    self._broken.add(item.key)
        return {section: section_cls(**values[section]) for section, section_cls in s.sections(self._cls)}

    def refuse(self, key: str, value: object, message: str, *besides: str) -> None:
        """Notes a value that does not go together with others (`besides`), as it was given and where. Notes
        nothing if one of them is wrong by itself: that is reported already, and may be the cause."""
        if self.incomplete or not self._broken.isdisjoint((key, *besides)):
            return
        given = self.given.get(key, Given(value, "default"))
        self.errors.append(ConfigError(key, given.raw, message, source=given.source))

    def broken(self, key: str) -> bool:
        """Whether a setting was given, and is wrong by itself."""
        return key in self._broken

    def raise_errors(self) -> None:
        """Raises ConfigError if anything was wrong."""
        if self.errors:
            raise ConfigError.of(self.errors)

    # --- inside ---

    def _take(self, item: Setting, named: list[Given], *, in_a_shell: bool = False) -> None:
        """Takes what one source says about a setting, perhaps by two names, which must agree."""
        # An empty variable is how a wrapper leaves one out, so it does not contradict one that is not empty.
        said = [value for value in named if value.raw != ""] or named[:1]
        if not said:
            return
        meant = [_absolute(item, value.raw) if in_a_shell else value.raw for value in said]
        if any(other != meant[0] for other in meant):
            first, second = said[0], said[1]
            message = f"{second.source} says {second.raw!r}, and both mean {item.key}: leave one of them out"
            self.errors.append(ConfigError(item.key, first.raw, message, source=first.source))
            self._broken.add(item.key)
        else:
            self.given[item.key] = Given(meant[0], said[0].source)

    def _unknown_key(self, key: str, raw: object, source: str) -> None:
        self._unknown(key, raw, source, "setting", nearest_keys(key, self._known))

    def _unknown(
        self, name: str, raw: object, source: str, what: str, near: list[str], *, usage: bool = False
    ) -> None:
        message = f"unknown {what} in {source}; the nearest known one is {' or '.join(near)}"
        self.errors.append(ConfigError(name, raw, message, usage=usage))


def _absolute(item: Setting, raw: object) -> object:
    """A socket named in a shell may be relative to where that shell is; in a file it may not."""
    return absolute_socket(raw) if item.parse is s.socket else raw


def absolute_socket(raw: object) -> object:
    """The socket's absolute path, without gRPC's `unix:`. Anything that is no path stays as it is."""
    if not isinstance(raw, str) or not raw or raw.startswith("unix-abstract:") or not raw.isprintable():
        return raw
    plain = raw.removeprefix("unix://").removeprefix("unix:")
    return os.path.abspath(os.path.expanduser(plain)) if plain else raw


def _is_service_link(name: str, raw: str) -> bool:
    """Whether Kubernetes, or a container runtime, set the variable for a service that is called kvtier."""
    if _SERVICE_LINK.fullmatch(name):
        return True
    return bool(_SERVICE_LINK_PORT.fullmatch(name)) and raw.startswith(("tcp://", "udp://", "sctp://"))


def all_flags(cls: type) -> Iterator[tuple[Setting, str]]:
    """Yields every flag of every setting. The flag that people are told about comes first for each
    setting."""
    for item in s.declared(cls):
        for flag in item.flags:
            yield item, flag
