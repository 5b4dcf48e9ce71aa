"""How settings are declared, read and refused: one mechanism for file, environment and command line.

What can be set is in `config.py`. A setting is a field of a frozen dataclass whose type is annotated with a
`Doc`: one sentence for people, and a parser that takes what TOML or a command line holds.
"""

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

ENV_PREFIX = "KVTIER_"

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class ConfigError(Exception):
    """A setting that cannot be used: says which one, what it holds, where that came from, and what to do."""

    def __init__(self, field: str, value: object, message: str, *, source: str = "") -> None:
        self.field, self.value, self.source, self.message = field, value, source, message
        super().__init__(f"{field} = {value!r}{f' (from {source})' if source else ''}: {message}")


@dataclass(frozen=True, slots=True)
class Doc:
    """What a setting means. `parse` takes TOML and text; its ValueError says what to write instead."""

    sentence: str
    parse: Callable[[object], Any]
    metavar: str = "VALUE"


# --- parsers ---


def text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("write it as text, in quotes")
    if not raw.isprintable():
        raise ValueError("write printable characters only")
    return raw


def path(raw: object) -> Path | None:
    """An absolute path; the empty text is None, "use the default"."""
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


def paths(raw: object) -> tuple[Path, ...]:
    """Different absolute paths: a list of texts, or one text with colons between them; none is empty."""
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


def size(raw: object) -> int:
    """A number of bytes: an integer, or text like 64GiB."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        value = raw
    else:
        match = _SIZE.fullmatch(raw) if isinstance(raw, str) else None
        units = {name.lower(): factor for name, factor in _UNITS.items()}
        factor = units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError("write a number with a unit, e.g. 64GiB or 512MiB")
        value = int(Fraction(match[1]) * factor)
    if not 0 <= value < 2**63:
        raise ValueError("a size is between 0 and 8 EiB")
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
    try:
        value = float(raw) if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else None
    except (ValueError, OverflowError):
        value = None
    if value is None or not least <= value <= most:
        raise ValueError(f"write a number of seconds from {least:g} to {most:g}")
    return value


def fraction(raw: object) -> float:
    try:
        value = float(raw) if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else None
    except (ValueError, OverflowError):
        value = None
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
    """host:port, [v6]:port, or "off"."""
    value = text(raw)
    if value == "off":
        return value
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("write host:port, e.g. 127.0.0.1:9470, or off")
    return value


def format_size(value: int) -> str:
    """64GiB, 512MiB, 1536KiB … : exact, and accepted by `size`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def human_size(value: float) -> str:
    """1.5 GiB, 312 B: rounded, for people."""
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


# --- reading ---


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting of a configuration class, for everything that lists them."""

    section: str
    name: str
    default: Any
    sentence: str
    parse: Callable[[object], Any]
    metavar: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}_{self.name}".upper()

    @property
    def flag(self) -> str:
        return f"--{self.section}-{self.name}".replace("_", "-")


def declared(cls: type) -> Iterator[Setting]:
    """Every setting of a configuration class, whose fields are its sections, in order."""
    for section, section_cls in _sections(cls):
        hints = get_type_hints(section_cls, include_extras=True)
        for item in dataclasses.fields(section_cls):
            doc = hints[item.name].__metadata__[0]
            yield Setting(section, item.name, item.default, doc.sentence, doc.parse, doc.metavar)


def sections(cls: type) -> Iterator[tuple[str, str]]:
    """Every section of a configuration class, in order, with its sentence: the docstring of its class."""
    for section, section_cls in _sections(cls):
        yield section, section_cls.__doc__


def _sections(cls: type) -> Iterator[tuple[str, Any]]:
    for section in dataclasses.fields(cls):
        yield section.name, section.default_factory


@dataclass(frozen=True, slots=True)
class Given:
    """One value somebody gave, not parsed yet."""

    raw: object
    source: str


def refuse(given: Mapping[str, Given], key: str, value: object, message: str) -> NoReturn:
    """Raises ConfigError for a value that does not go with others, naming where it came from."""
    raise ConfigError(key, value, message, source=given[key].source if key in given else "default")


def from_file(cls: type, file: Path) -> dict[str, Given]:
    """Settings of a TOML file by key. Raises ConfigError: not readable, not TOML, unknown section or key."""
    try:
        tables = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "config", str(file), f"cannot be read: {error}; name a readable TOML file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", str(file), f"is not valid TOML: {error}") from None
    known = {item.key: item for item in declared(cls)}
    sections = {item.section for item in known.values()}
    found: dict[str, Given] = {}
    for section, table in tables.items():
        if section not in sections:
            raise _unknown(section, sections, str(file), "section")
        if not isinstance(table, dict):
            message = f"is a section: write [{section}] and its settings below"
            raise ConfigError(section, table, message, source=str(file))
        for name, raw in table.items():
            if f"{section}.{name}" not in known:
                raise _unknown(f"{section}.{name}", known, str(file), "setting")
            found[f"{section}.{name}"] = Given(raw, str(file))
    return found


def from_environment(
    cls: type, environ: Mapping[str, str], besides: Collection[str] = ()
) -> dict[str, Given]:
    """Settings of the environment by key. A name that starts like one of ours and is none is refused, but for
    those of `besides`."""
    by_env = {item.env: item for item in declared(cls)}
    prefixes = tuple({f"{ENV_PREFIX}{item.section}_".upper() for item in by_env.values()})
    found = {}
    for name, raw in environ.items():
        if name in by_env:
            found[by_env[name].key] = Given(raw, f"environment {name}")
        elif name.startswith(prefixes) and name not in besides:
            raise _unknown(name, by_env, "the environment", "variable")
    return found


def _unknown(name: str, known: Any, source: str, what: str) -> ConfigError:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return ConfigError(name, "", f"unknown {what} in {source}; the nearest known one is {nearest[0]}")


def build(cls: type, given: Mapping[str, Given]) -> dict[str, Any]:
    """Parses what was given; returns the sections, ready for `cls(**sections)`. The rest keeps its default.

    Raises ConfigError for the first value that cannot be parsed.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section, _ in _sections(cls)}
    for item in declared(cls):
        if (value := given.get(item.key)) is not None:
            try:
                values[item.section][item.name] = item.parse(value.raw)
            except ValueError as error:
                raise ConfigError(item.key, value.raw, str(error), source=value.source) from None
    return {section: section_cls(**values[section]) for section, section_cls in _sections(cls)}


def runtime_directory(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Where sockets go by default: $XDG_RUNTIME_DIR/kvtier, else /tmp/kvtier-UID."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and Path(base).is_absolute():
        return Path(base) / "kvtier"
    return Path(f"/tmp/kvtier-{os.getuid() if uid is None else uid}")
