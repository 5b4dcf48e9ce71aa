"""How settings are declared, and how single values are parsed: in the same way for file, environment and
flags.

The settings are in `daemon.py` and `disk.py`, and `reading.py` combines what was given. A setting is a field
of a frozen dataclass, declared with `setting`: a default, a parser for what TOML or a command line holds, and
one sentence for people.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

ENV_PREFIX = "KVTIER_"
_Value = TypeVar("_Value")

SIZE_FORMS = (
    "64Gi or 64GiB is 64 x 2^30 bytes; 64G, 64g or 64GB is 64 x 10^9; K, M, T and P work in the same way"
)
"""The ways to write a size, for error messages and help."""
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    # As in Kubernetes' quantities and in the SI, only the "i" makes a unit binary.
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


class ConfigError(Exception):
    """A setting that cannot be used. The text says which one, what it holds, where that came from, and what
    to do.

    `others` are the other errors of the same configuration, which the text names as well, one a line.
    `usage`: it is not a setting, but something on a command line that does not exist.
    """

    def __init__(
        self,
        field: str,
        value: object,
        message: str,
        *,
        source: str = "",
        usage: bool = False,
        others: Sequence["ConfigError"] = (),
    ) -> None:
        self.field, self.value, self.source, self.message = field, value, source, message
        self.usage, self.others = usage, tuple(others)
        self.line = f"{field} = {value!r}{f' (from {source})' if source else ''}: {message}"
        lines = [each.line for each in self.all]
        told = [f"{len(lines)} things are wrong with the configuration", *(f"  {line}" for line in lines)]
        super().__init__("\n".join(told) if self.others else self.line)

    @classmethod
    def of(cls, errors: Sequence["ConfigError"]) -> "ConfigError":
        """Makes one error of several; there must be at least one."""
        first, *others = errors
        return cls(
            first.field, first.value, first.message, source=first.source, usage=first.usage, others=others
        )

    @property
    def all(self) -> tuple["ConfigError", ...]:
        """This error and the others, one by one."""
        return (self, *self.others)


# --- parsers ---


def text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("write it as text, in quotes")
    if not raw.isprintable():
        raise ValueError("write printable characters only")
    return raw


def path(raw: object) -> Path | None:
    """Parses an absolute path. The empty text gives None, which means the default."""
    value = text(raw)
    if not value:
        return None
    try:
        found = Path(value).expanduser()
    except RuntimeError:
        raise ValueError("there is no such user: write an absolute path") from None
    if not found.is_absolute():
        raise ValueError("write an absolute path")
    return found


def socket(raw: object) -> Path | None:
    """Parses the absolute path of a socket, also in gRPC's form `unix:PATH`. The empty text gives None."""
    value = text(raw)
    if value.startswith("unix-abstract:"):
        raise ValueError("an abstract socket has no permissions: write the path of a file")
    return path(value.removeprefix("unix://").removeprefix("unix:"))


def paths(raw: object) -> tuple[Path, ...]:
    """Different absolute paths: a list of texts, or one text with colons between them. None may be empty."""
    if not isinstance(raw, list):
        raw = text(raw).split(":") if raw else []
    parts = [text(part) for part in raw]
    found = tuple(each for each in map(path, parts) if each is not None)
    if len(found) < len(parts):
        raise ValueError("one of them is empty: write absolute paths, with one colon between two")
    plain = [os.path.normpath(each) for each in found]
    if repeated := [name for number, name in enumerate(plain) if name in plain[:number]]:
        raise ValueError(f"{repeated[0]} is named twice: write each directory once")
    return tuple(map(Path, plain))


def boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return raw.lower() in ("true", "yes", "on", "1")
    raise ValueError("write true or false")


def size(raw: object, *, least: int = 0) -> int:
    """Parses a number of bytes, at least `least`: an integer, or text in one of SIZE_FORMS."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        value = raw
    else:
        match = _SIZE.fullmatch(raw) if isinstance(raw, str) else None
        factor = _UNITS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError(f"write a number of bytes, or a number with a unit: {SIZE_FORMS}")
        value = int(Fraction(match[1]) * factor)
    if not 0 <= value < 2**63:
        raise ValueError("a size is between 0 and 8 EiB")
    if value < least:
        raise ValueError(f"write a size of at least {human_size(least)}")
    return value


def count(raw: object, *, least: int = 1, most: int = 2**31 - 1) -> int:
    try:
        value = int(raw) if isinstance(raw, str) else raw
    except ValueError:
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"write a whole number from {least} to {most}")
    return value


def seconds(raw: object, *, least: float = 0.001, most: float = 1e6) -> float:
    value = _number(raw)
    if value is None or not least <= value <= most:
        raise ValueError(f"write a number of seconds from {least:g} to {most:.15g}, without a unit")
    return value


def times(raw: object, *, most: float = 1e3) -> float:
    """Parses how often something may happen; it need not be a whole number."""
    value = _number(raw)
    if value is None or not 0 <= value <= most:
        raise ValueError(f"write a number from 0 to {most:g}, e.g. 0.5")
    return value


def _number(raw: object) -> float | None:
    try:
        return float(raw) if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else None
    except (ValueError, OverflowError):
        return None


def fraction(raw: object) -> float:
    value = _number(raw)
    if value is None or not 0 < value <= 1:
        raise ValueError("write a number above 0 and up to 1, e.g. 0.25")
    return value


def choice(*names: str) -> Callable[[object], str]:
    def parse(raw: object) -> str:
        if raw not in names:
            raise ValueError(f"write one of {', '.join(names)}")
        return str(raw)

    return parse


def address(raw: object) -> str:
    """Parses an address: host:port, [v6]:port, or "off"."""
    value = text(raw)
    if value == "off":
        return value
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("write host:port, e.g. 127.0.0.1:9470, or off")
    return value


_METAVARS: dict[Callable[..., Any], str] = {
    text: "NAME",
    path: "PATH",
    socket: "PATH",
    paths: "PATH:...",
    boolean: "BOOL",
    size: "SIZE",
    count: "N",
    seconds: "SECONDS",
    fraction: "FRACTION",
    address: "HOST:PORT",
}
"""What help shows in place of a value, by its parser."""


def setting(
    default: _Value, parse: Callable[[object], Any], sentence: str, *, metavar: str = "", short: str = ""
) -> _Value:
    """Declares a field of a configuration class. `parse` takes TOML and text; its ValueError says what to
    write instead. `sentence` says for people what the setting means.

    `metavar`: what help shows in place of a value, where the parser does not say it. `short`: the name by
    which flag and variable are known, where that is not section and name; the long ones are understood as
    well.
    """
    kind = parse.func if isinstance(parse, partial) else parse
    about = {"parse": parse, "metavar": metavar or _METAVARS[kind], "sentence": sentence, "short": short}
    return dataclasses.field(default=default, metadata=about)


_EXACT_UNITS = tuple((unit, _UNITS[unit.lower()]) for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB"))
"""The units of `format_size`, from the largest to the smallest."""


def format_size(value: int) -> str:
    """Writes a size exactly, in a form that `size` accepts: 64GiB, 512MiB, 1536KiB, 64GB."""
    for unit, factor in _EXACT_UNITS:
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def human_size(value: float) -> str:
    """Writes a size for people, rounded to four digits: 1.5 GiB, 312 B."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.0f} B"


def size_and_parts(size_bytes: int, file_bytes: int, extents_bytes: int) -> str:
    """The configured size of a pool or a slab, and what becomes of it, for people: `64 MiB (62 MiB for blocks
    and their slot tables, 2 MiB for the file's header)`. The file is its header and whole extents."""
    parts = [
        f"{human_size(extents_bytes)} for blocks and their slot tables",
        f"{human_size(file_bytes - extents_bytes)} for the file's header",
    ]
    if size_bytes > file_bytes:
        parts.append(f"{human_size(size_bytes - file_bytes)} too little for another extent")
    return f"{human_size(size_bytes)} ({', '.join(parts)})"


# --- what is declared ---


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting of a configuration class, for everything that lists them."""

    section: str
    name: str
    default: Any
    parse: Callable[[object], Any]
    metavar: str
    sentence: str
    short: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        """The variable that people are told about."""
        return self.envs[0]

    @property
    def flag(self) -> str:
        """The flag that people are told about."""
        return self.flags[0]

    @property
    def envs(self) -> tuple[str, ...]:
        """Every environment variable that sets it."""
        return tuple(f"{ENV_PREFIX}{name}".upper() for name in self._names)

    @property
    def flags(self) -> tuple[str, ...]:
        """Every flag that sets it."""
        return tuple(f"--{name}".replace("_", "-") for name in self._names)

    @property
    def _names(self) -> tuple[str, ...]:
        long = f"{self.section}_{self.name}"
        return (self.short, long) if self.short else (long,)


def declared(cls: type) -> Iterator[Setting]:
    """Every setting of a configuration class, whose fields are its sections, in order."""
    for section, section_cls in sections(cls):
        for item in dataclasses.fields(section_cls):
            yield Setting(section, item.name, item.default, **item.metadata)


def section_sentences(cls: type) -> Iterator[tuple[str, str]]:
    """Every section of a configuration class, in order, with its sentence: the docstring of its class."""
    for section, section_cls in sections(cls):
        yield section, section_cls.__doc__


def sections(cls: type) -> Iterator[tuple[str, Any]]:
    """The sections of a configuration class by name, each with its own class."""
    for section in dataclasses.fields(cls):
        yield section.name, section.default_factory


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given, not parsed yet, and where it was given."""

    raw: object
    source: str


def runtime_directory(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """The folder of sockets by default: $XDG_RUNTIME_DIR/kvtier, or /tmp/kvtier-UID without that variable."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and Path(base).is_absolute():
        return Path(base) / "kvtier"
    return Path(f"/tmp/kvtier-{os.getuid() if uid is None else uid}")
