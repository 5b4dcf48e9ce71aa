"""The settings of a store that hosts share."""

import re
from dataclasses import dataclass

from kvtierd.config import settings as s
from kvtierd.config.disk import DISK_BYTES_MAX, QUEUE_BYTES_MIN, Refuse, check_extents
from kvtierd.config.people import tenant_names
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.errors import Refusal
from kvtierd.core.stimuli import CoreDisks, WriteMode
from kvtierd.tiers.store.coding import Compression
from kvtierd.tiers.store.drivers import find_driver

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
_OPTION = re.compile(r"([a-z][a-z0-9_]*)=(.*)")
_SECRETS = ("secret", "token", "password", "key")
_STORE = CoreDisks()


def url(raw: object) -> str:
    """A URL of a store, or nothing."""
    found = s.text(raw).rstrip("/") if raw else ""
    if found and not _URL.fullmatch(found):
        raise ValueError(
            "write s3://BUCKET/FOLDER, gs://…, az://…, file:///FOLDER for a shared folder, or what another "
            "driver says"
        )
    return found


def options(raw: object) -> tuple[tuple[str, str], ...]:
    """Options of the store's client: a table, or NAME=VALUE with commas between them."""
    if isinstance(raw, dict):
        return tuple(sorted((str(name), s.text(value)) for name, value in raw.items()))
    if isinstance(raw, tuple | list) and all(isinstance(each, tuple) for each in raw):
        return tuple(raw)
    found = []
    for part in s.text(raw).split(",") if raw else []:
        match = _OPTION.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()}: write NAME=VALUE, for example endpoint=https://minio:9000")
        found.append((match[1], match[2]))
    return tuple(sorted(found))


def is_secret(option: str) -> bool:
    """Whether the value of an option of this name is nobody's business."""
    return any(part in option for part in _SECRETS)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store that hosts share: what one of them stores, the others can load."""

    url: str = s.setting(
        "",
        url,
        "Where blocks are shared with other hosts: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, az://CONTAINER, "
        "file:///FOLDER on a file system that they share, mooncake://MASTER:PORT/FOLDER, or what another "
        "driver says. Empty: nowhere.",
        metavar="URL",
    )
    options: tuple[tuple[str, str], ...] = s.setting(
        (),
        options,
        "What the store's driver is told besides, for buckets as obstore names it, for example endpoint and "
        "region, for Mooncake as docs/store.md names it: NAME=VALUE with commas between them. Credentials "
        "come from the environment, or from the machine.",
        metavar="OPTIONS",
    )
    size: int = s.setting(
        1 << 40,
        s.size,
        "Bytes of the blocks in the store that this host remembers, and so can find; others are misses.",
    )
    write_mode: str = s.setting(
        WriteMode.ON_REUSE.value,
        s.choice(*(mode.value for mode in WriteMode)),
        "When a block is put into the store: on-reuse (when it is found for the first time), through (as "
        "soon as it is stored) or back (before it is evicted).",
        metavar="MODE",
    )
    compression: str = s.setting(
        Compression.OFF.value,
        s.choice(*(each.value for each in Compression)),
        "How what this host puts into the store is compressed: off or zstd. What others have compressed is "
        "read in any case.",
        metavar="METHOD",
    )
    tenants: tuple[str, ...] = s.setting(
        (),
        tenant_names,
        "The tenants whose blocks are put into the store, and looked for there; uid:N is a user without a "
        "rule. Empty: all.",
        metavar="TENANT,...",
    )
    write_bytes_per_s: int = s.setting(
        _STORE.write_bytes_per_s, s.size, "At most so many bytes are put in a second. 0: any number."
    )
    deadline_s: float = s.setting(10.0, s.seconds, "How long one call of the store may take, with retries.")
    look_every_s: float = s.setting(
        5.0, s.seconds, "How often this host looks for what others have put there."
    )
    write_queue_size: int = s.setting(_STORE.write_queue_bytes, s.size, "Bytes on their way there at once.")
    read_queue_size: int = s.setting(
        _STORE.read_queue_bytes, s.size, "Bytes on their way from there at once; others come after them."
    )
    errors_max: int = s.setting(
        _STORE.errors_max, s.count, "After this many errors in a row the store is not used for a while."
    )
    probe_after_s: float = s.setting(
        _STORE.probe_after_s,
        s.seconds,
        "How long it is not used then; after that, one read decides whether it is.",
    )
    recompute_if_faster: bool = s.setting(
        _STORE.recompute_if_faster,
        s.boolean,
        "Report blocks as missing where their engine computes them faster than they load.",
    )

    def to_core(self) -> CoreDisks:
        return CoreDisks(
            mode=WriteMode(self.write_mode),
            write_bytes_per_s=self.write_bytes_per_s,
            write_queue_bytes=self.write_queue_size,
            read_queue_bytes=self.read_queue_size,
            slow_deadline_s=2 * self.deadline_s,  # a read may take two calls
            errors_max=self.errors_max,
            probe_after_s=self.probe_after_s,
            recompute_if_faster=self.recompute_if_faster,
            tenants=frozenset(map(tag_of, self.tenants)) if self.tenants else None,
        )


def check_store(store: StoreConfig, refuse: Refuse) -> None:
    """Refuses settings that are wrong only together with others."""
    if not store.url:
        return
    try:
        find_driver(store.url)
    except Refusal as refusal:
        refuse("store.url", store.url, refusal.message)
    check_extents(refuse, "store", store.size, 0)
    if store.size > DISK_BYTES_MAX:
        refuse("store.size", s.format_size(store.size), f"write at most {s.format_size(DISK_BYTES_MAX)}")
    for name in ("write_queue_size", "read_queue_size"):
        if (value := getattr(store, name)) < QUEUE_BYTES_MIN:
            refuse(f"store.{name}", s.format_size(value), f"write at least {s.format_size(QUEUE_BYTES_MIN)}")
