"""Everything that can be configured, with its default. It is read once at the start: file, environment and
flags, each overriding the ones before.

A setting `size` of section `pool` is `[pool] size = "64GiB"` in the file, KVTIER_POOL_SIZE in the environment
and `--pool-size` on the command line.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvtierd.config import settings as s
from kvtierd.config.disk import DiskConfig, Refuse, check_disks, check_extents
from kvtierd.config.events import EventsConfig, check_events
from kvtierd.config.people import (
    ROOT,
    People,
    TenantRule,
    WrittenShare,
    everybody_of,
    tenant_rules,
    tenant_shares,
)
from kvtierd.config.reading import CONFIG_VARIABLE, Reading
from kvtierd.config.remote import RemoteConfig, check_remote
from kvtierd.config.settings import ConfigError, Given
from kvtierd.config.store import StoreConfig, check_store, is_secret
from kvtierd.config.store import options as store_options
from kvtierd.core.stimuli import CoreIntegrity, CoreLimits, PoolPolicy, Verify
from kvtierd.workers.lane_chunks import LaneChunks, Pacing
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerOptions

DEFAULT_FILE = Path("/etc/kvtier/kvtierd.toml")
SOCKET_NAME = "kvtierd.sock"
MESSAGE_BYTES_MAX = 256 << 20
"""The most that `server.message_bytes_max` may be. Four times as much, from where on gRPC itself refuses a
message (`rpc.guard`), has to fit into 31 bits."""
SOCKET_PATH_BYTES_MAX = 107
"""The longest path of a Unix socket: its address (sun_path) without the final zero byte."""

_CORE = CoreLimits()
_INTEGRITY = CoreIntegrity()
_SUPERVISOR = SupervisorLimits()
_WORKERS = WorkerOptions()
_CHUNKS = _WORKERS.gpu_chunks
CHUNK_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where engines and operators reach the daemon, and how it treats its sessions."""

    socket: Path | None = s.setting(
        None,
        s.socket,
        "gRPC socket, with the side socket beside it; kvtierctl and clients take the same names. "
        "Empty: kvtierd.sock in $XDG_RUNTIME_DIR/kvtier, or in /tmp/kvtier-UID without that variable.",
        short="socket",
    )
    group: str = s.setting(
        "", s.text, "Unix group that may use the sockets besides their owner. Empty: the owner only."
    )
    tenants: tuple[TenantRule, ...] = s.setting(
        (),
        tenant_rules,
        "Who is of which tenant, as WHO=TENANT, the first that fits; WHO is user:NAME, uid:N, uid:N-M, "
        "group:NAME, gid:N or *. Engines share blocks only within a tenant. Without a rule, each user is a "
        "tenant, uid:N. On the remote port, WHO is cert:NAME (a URI or DNS name in the caller's certificate, "
        "or its common name if it has neither) or anonymous, and callers without a rule see nothing.",
        metavar="RULE,...",
    )
    tenant_shares: tuple[WrittenShare, ...] = s.setting(
        (),
        tenant_shares,
        "What part of the pool and of each disk a tenant is guaranteed, and may have at most, as "
        "TENANT=LEAST or TENANT=LEAST-MOST in fractions; uid:N is a user without a rule. The others share "
        "equally what is left.",
        metavar="SHARE,...",
    )
    operators: tuple[People, ...] = s.setting(
        (ROOT,),
        everybody_of,
        "Who may drain, clear, scrub and reload, besides the daemon's own user; written like WHO of tenants.",
        metavar="WHO,...",
    )
    health_listen: str = s.setting(
        "off",
        s.address,
        "Where gRPC health checks are answered over TCP, and nothing else, for Kubernetes' probes; off: "
        "on the socket only.",
    )
    message_bytes_max: int = s.setting(
        4 << 20, s.size, "Bytes of one gRPC message, at most 256MiB; larger ones are refused."
    )
    sessions_max: int = s.setting(256, partial(s.count, most=65_536), "Sessions at once; more are refused.")
    outgoing_max: int = s.setting(
        4096, s.count, "Messages waiting for one client to read them; one that lets more pile up is dropped."
    )
    hello_deadline_s: float = s.setting(
        10.0, s.seconds, "A connection that has not said hello after this long is closed."
    )
    heartbeat_interval_s: float = s.setting(5.0, s.seconds, "How often clients are told to send a heartbeat.")
    session_silence_s: float = s.setting(
        30.0, s.seconds, "A session silent for this long is ended, as if its process had died."
    )
    drain_s: float = s.setting(
        20.0,
        partial(s.seconds, least=0),
        "How long SIGTERM waits for running transfers before it ends the sessions.",
    )

    @property
    def socket_path(self) -> Path:
        return self.socket or s.runtime_directory() / SOCKET_NAME

    @property
    def side_socket_path(self) -> Path:
        return side_socket_of(self.socket_path)

    @property
    def lock_path(self) -> Path:
        return lock_of(self.socket_path)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The host memory that holds the blocks."""

    path: Path | None = s.setting(
        None, s.path, "Pool file, on tmpfs or hugetlbfs. Empty: /dev/shm/kvtier-UID/pool."
    )
    size: int = s.setting(1 << 30, s.size, "Bytes of the pool.")
    extent_size: int = s.setting(
        0, s.size, "Bytes of one extent, a power of two from 1MiB to 1GiB. 0: chosen from the pool's size."
    )
    policy: str = s.setting(
        PoolPolicy.LRU.value,
        s.choice(*(policy.value for policy in PoolPolicy)),
        "Which blocks go first: lru, those that have not been used for longest; reuse, those that are least "
        "likely to come back soon, by what the daemon learns of blocks like them.",
        metavar="NAME",
    )
    persistent: bool = s.setting(
        True, s.boolean, "Keep the pool in a file that outlives the daemon; otherwise it is anonymous memory."
    )
    lock_timeout_s: float = s.setting(
        10.0,
        partial(s.seconds, least=0),
        "How long to wait until the pool's previous owner and its copy workers are gone.",
    )

    @property
    def file(self) -> Path | None:
        """The pool's file; None if the pool is anonymous memory."""
        if not self.persistent:
            return None
        return self.path or Path(f"/dev/shm/kvtier-{os.getuid()}/pool")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What one engine, or one call of it, may use."""

    lookup_hashes_max: int = s.setting(_CORE.lookup_hashes_max, s.count, "Hashes in one lookup.")
    # A part is sent to its copy worker as one packet.
    transfer_blocks_max: int = s.setting(
        _CORE.transfer_blocks_max, partial(s.count, most=8_192), "Blocks in one store or load."
    )
    transfers_max: int = s.setting(_CORE.transfers_max, s.count, "Transfers in flight per instance.")
    tenant_transfers_max: int = s.setting(
        _CORE.tenant_transfers_max, s.count, "Transfers in flight per tenant, of all its instances."
    )
    tenant_blocks_max: int = s.setting(
        _CORE.tenant_blocks_max, s.count, "Blocks in these transfers; 16 bytes each in a copy worker."
    )
    leases_max: int = s.setting(_CORE.leases_max, s.count, "Leases at once per instance.")
    leased_fraction_max: float = s.setting(
        _CORE.leased_fraction_max,
        s.fraction,
        "Share of the pool that leases and running loads of all instances may hold; stores find room in "
        "the rest.",
    )
    held_fraction_max: float = s.setting(
        _CORE.held_fraction_max,
        s.fraction,
        "Share of the pool in which blocks may be held for a time (Retention.hold_ms), all together.",
    )
    hold_s_max: float = s.setting(
        _CORE.hold_s_max, s.seconds, "Blocks are held no longer than this at a time."
    )
    lease_ttl_s: float = s.setting(
        _CORE.lease_ttl_s, s.seconds, "A lease ends this long after its instance's last heartbeat."
    )
    lease_lifetime_s: float = s.setting(
        _CORE.lease_lifetime_s, s.seconds, "A lease ends this long after it was granted, heartbeats or not."
    )
    gate_deadline_s: float = s.setting(
        _CORE.gate_deadline_s, s.seconds, "A gated part whose doorbell has not rung for this long is revoked."
    )
    transfer_deadline_s: float = s.setting(
        _CORE.transfer_deadline_s, s.seconds, "A transfer older than this is cancelled."
    )
    terminal_kept: int = s.setting(
        _CORE.terminal_kept, s.count, "Ended transfers remembered per instance, for Wait."
    )

    def to_core(self) -> CoreLimits:
        return CoreLimits(**dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class IntegrityConfig:
    """When stored bytes are compared with their checksums."""

    verify: str = s.setting(
        _INTEGRITY.verify.value,
        s.choice("restart", "always"),
        "When a host block is compared with its checksum before a load: restart (only before the first load "
        "of a block that an earlier daemon left) or always. With restart, a block whose bytes change in "
        "memory while the daemon lives is served until a sample finds it; always takes about a quarter more "
        "processor time to load. A block's record is checked on every load.",
        metavar="WHEN",
    )
    sample_bytes_per_s: int = s.setting(
        _INTEGRITY.sample_bytes_per_s,
        s.size,
        "Bytes of the host pool compared with their checksums every second while nothing is copied, at "
        "random. 0: none.",
    )
    remembered_blocks: int = s.setting(
        _INTEGRITY.remembered_blocks,
        partial(s.count, most=1 << 22),
        "Blocks of which `kvtierctl explain` knows why they are gone, the latest; 44 bytes each.",
    )

    def to_core(self) -> CoreIntegrity:
        return CoreIntegrity(Verify(self.verify), self.sample_bytes_per_s, self.remembered_blocks)


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The processes that copy blocks between engines and the pool."""

    copy_deadline_s: float = s.setting(
        10.0, s.seconds, "A copy worker stuck in one copy for this long is killed and started again."
    )
    gpu_copy_method: str = s.setting(
        _WORKERS.gpu_copy_method,
        s.choice("auto", "batch", "loop", "rows"),
        "How GPUs' workers copy: auto (what the driver does best), batch, loop, or rows (2D copies).",
        metavar="METHOD",
    )
    gpu_load_chunk: int = s.setting(
        _CHUNKS.load_bytes,
        partial(s.size, least=CHUNK_BYTES_MIN),
        "The most data that a GPU's worker loads in one submission to the driver.",
    )
    gpu_store_chunk: int = s.setting(
        _CHUNKS.store_bytes, partial(s.size, least=CHUNK_BYTES_MIN), "The same for stores."
    )
    gpu_flights: int = s.setting(
        _CHUNKS.flights,
        partial(s.count, most=8),
        "How many such submissions of loads, and of stores, a GPU has at a time.",
    )
    gpu_pacing: str = s.setting(
        _CHUNKS.pacing.value,
        s.choice(*(pacing.value for pacing in Pacing)),
        "When a GPU's worker copies in small chunks, one at a time, so that the small copies of an engine's "
        "steps need not wait for it: stepping (while an engine computes), always or never.",
        metavar="WHEN",
    )
    gpu_paced_chunk: int = s.setting(
        _CHUNKS.paced_bytes, partial(s.size, least=CHUNK_BYTES_MIN), "The most data of such a small chunk."
    )
    gpu_idle_s: float = s.setting(
        _SUPERVISOR.gpu_idle_s,
        partial(s.seconds, least=0),
        "A GPU's worker that no session has used for this long is ended, which frees its memory there. "
        "0: never.",
    )
    seal_threads: int = s.setting(
        _WORKERS.seal_threads,
        partial(s.count, least=0, most=64),
        "Threads of each GPU's worker that compute checksums of what was stored. 0: one for two processors, "
        "2 to 8.",
    )

    def lane_chunks(self) -> LaneChunks:
        """What the settings say of the chunks of a GPU's lanes."""
        return LaneChunks(
            self.gpu_load_chunk,
            self.gpu_store_chunk,
            self.gpu_flights,
            Pacing(self.gpu_pacing),
            self.gpu_paced_chunk,
        )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What Prometheus scrapes."""

    listen: str = s.setting(
        "127.0.0.1:9470",
        s.address,
        "Where Prometheus metrics are served; port 0 picks a free one, off serves none. If nobody sets "
        "it, and the default port is taken, as by another user's daemon, a free one is used.",
    )
    by_tenant: bool = s.setting(
        False,
        s.boolean,
        "Whether metrics say what each tenant has and does (the metrics that begin with kvtier_tenant_). "
        "Anybody who can reach metrics.listen can read them, as every user of the host can by default, so "
        "switch this on only where that is no secret, or where a firewall lets nobody but Prometheus in. "
        "kvtierctl status tells operators the same.",
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The daemon's log, on its standard error."""

    level: str = s.setting(
        "info",
        s.choice("debug", "info", "warning", "error"),
        "debug, info, warning or error.",
        metavar="LEVEL",
    )
    format: str = s.setting(
        "auto",
        s.choice("auto", "human", "json"),
        "human, json, or auto: human on a terminal, JSON lines otherwise.",
        metavar="FORMAT",
    )


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each value that is not a default came from."""

    config: Config
    given: Mapping[str, Given]
    file: Path | None

    @property
    def may_move_metrics(self) -> bool:
        """Whether metrics may be served on another port if theirs is taken, because nobody has chosen it."""
        return "metrics.listen" not in self.given


def side_socket_of(socket: Path) -> Path:
    """The side socket that belongs to a gRPC socket: kvtierd.sock has kvtierd.side.sock beside it."""
    return socket.with_name(f"{socket.name.removesuffix('.sock')}.side.sock")


def lock_of(socket: Path) -> Path:
    """The file whose lock makes a daemon the owner of a gRPC socket; removed when its owner ends."""
    return socket.with_name(f"{socket.name}.lock")


def load(
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    leftovers: Iterable[str] = (),
) -> Loaded:
    """Reads the file, the environment, and flags (`--pool-size`, or by key: `pool.size`). Later ones override
    earlier ones.

    Without `file`, KVTIER_CONFIG names it, else it is /etc/kvtier/kvtierd.toml if that exists. `leftovers`
    are the arguments of a command line that are no known flags. Raises ConfigError, which says everything
    that is wrong. Changes nothing.
    """
    source = "--config"
    if file is None and environ.get(CONFIG_VARIABLE):
        file, source = Path(environ[CONFIG_VARIABLE]), f"environment {CONFIG_VARIABLE}"
    if file is None and _may_exist(DEFAULT_FILE):
        file, source = DEFAULT_FILE, "default"
    reading = Reading(Config)
    if file is not None:
        reading.read_file(file, source)
    reading.read_environment(environ)
    reading.read_flags(flags or {})
    reading.read_leftovers(leftovers)
    config = Config(**reading.build())
    _check(config, reading.refuse)
    check_remote(config.remote, reading.refuse)
    check_events(config.events, reading.refuse)
    has_disks = bool(config.disk.paths) or reading.broken("disk.paths")
    check_disks(config.disk, reading.refuse, wanted=has_disks)
    check_store(config.store, reading.refuse)
    reading.raise_errors()
    return Loaded(config, reading.given, file)


def _may_exist(file: Path) -> bool:
    """Whether a file may exist. True if this user may not look, because reading the file then says why."""
    try:
        return file.exists()
    except OSError:
        return True


def named_socket(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The socket that the environment names, even if something else is wrong with the configuration. Raises
    ConfigError if it cannot be a socket."""
    reading = Reading(Config)
    reading.read_environment(environ)
    if wrong := [error for error in reading.errors if error.field == "server.socket"]:
        raise ConfigError.of(wrong)
    given = reading.given.get("server.socket")
    if given is None:
        return None
    try:
        found = s.socket(given.raw)
        why = check_socket(found) if found else ""
    except ValueError as error:
        why = str(error)
    if why:
        raise ConfigError("server.socket", given.raw, why, source=given.source)
    return found


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each variable that begins with our prefix and is none of ours."""
    reading = Reading(Config)
    reading.read_environment(environ)
    return [error.line for error in reading.errors if error.field.startswith(s.ENV_PREFIX)]


def check_socket(socket: Path) -> str:
    """Why a path is too long for our sockets, and how long it may be; empty if it is not too long."""
    side = side_socket_of(socket)
    if (length := len(os.fsencode(side))) <= SOCKET_PATH_BYTES_MAX:
        return ""
    return (
        f"the side socket beside it, {side}, would have a path of {length} bytes, and that of a Unix socket "
        f"has at most {SOCKET_PATH_BYTES_MAX}: use a shorter path, of at most "
        f"{SOCKET_PATH_BYTES_MAX - (length - len(os.fsencode(socket)))} bytes"
    )


def _check(config: Config, refuse: Refuse) -> None:
    """Refuses values that are wrong only together with others."""
    server, pool, limits = config.server, config.pool, config.limits
    if why := check_socket(server.socket_path):
        refuse("server.socket", str(server.socket_path), why)
    check_extents(refuse, "pool", pool.size, pool.extent_size)
    if pool.path is not None and not pool.persistent:
        refuse(
            "pool.path",
            str(pool.path),
            "an anonymous pool has no file: leave it out, or set pool.persistent",
            "pool.persistent",
        )
    if 2 * server.heartbeat_interval_s > limits.lease_ttl_s:
        refuse(
            "server.heartbeat_interval_s",
            server.heartbeat_interval_s,
            f"must be at most half of limits.lease_ttl_s ({limits.lease_ttl_s:g}), "
            "or leases expire between heartbeats",
            "limits.lease_ttl_s",
        )
    if server.session_silence_s < 2 * server.heartbeat_interval_s:
        refuse(
            "server.session_silence_s",
            server.session_silence_s,
            f"must be at least twice server.heartbeat_interval_s ({server.heartbeat_interval_s:g})",
            "server.heartbeat_interval_s",
        )
    if server.message_bytes_max > MESSAGE_BYTES_MAX:
        refuse(
            "server.message_bytes_max",
            s.format_size(server.message_bytes_max),
            f"write at most {s.format_size(MESSAGE_BYTES_MAX)}: a message is held in memory as a whole",
        )
    lookup_bytes = limits.lookup_hashes_max * 32 + 4096
    transfer_bytes = limits.transfer_blocks_max * (32 + 5) + 4096
    if server.message_bytes_max < (need := max(lookup_bytes, transfer_bytes)):
        refuse(
            "server.message_bytes_max",
            s.format_size(server.message_bytes_max),
            f"the largest call that limits allow needs {need} bytes: raise it or lower the limits",
            "limits.lookup_hashes_max",
            "limits.transfer_blocks_max",
        )


def show(loaded: Loaded) -> str:
    """The whole configuration as TOML that `--config` can read, with each setting's sentence and origin. Of
    the options of a store, those that are secrets are left out, and named."""
    lines: list[str] = [f"# Sizes: {s.SIZE_FORMS}."]
    section = ""
    sentences = dict(s.section_sentences(Config))
    for item in s.declared(Config):
        if item.section != section:
            section = item.section
            lines += ["", f"# {sentences[section]}", f"[{section}]"]
        value = getattr(getattr(loaded.config, item.section), item.name)
        origin = _origin(loaded, item, value)
        if item.parse is store_options and (hidden := [name for name, _ in value if is_secret(name)]):
            origin += f"; not shown: {', '.join(hidden)}"
        lines += [f"# {item.sentence} ({origin})", f"{item.name} = {as_toml(item, value)}"]
    return "\n".join(lines) + "\n"


def _origin(loaded: Loaded, item: s.Setting, value: Any) -> str:
    """Says where a value came from, and how it was written if that differs from how it is shown."""
    if item.key not in loaded.given:
        return "default"
    given = loaded.given[item.key]
    if item.parse is s.size and str(given.raw) != s.format_size(value):
        return f"{given.source}: {given.raw!r}, {s.human_size(value)}"
    return given.source


def as_toml(item: s.Setting, value: Any) -> str:
    """Writes a value as a configuration file would have it, without the secrets of a store."""
    if item.parse is s.size:
        return json.dumps(s.format_size(value)) if value else "0"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if item.parse is store_options:
        pairs = [
            f"{json.dumps(name)} = {json.dumps(told, ensure_ascii=False)}"
            for name, told in value
            if not is_secret(name)
        ]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, tuple):
        return json.dumps([str(each) for each in value], ensure_ascii=False)
    return json.dumps("" if value is None else str(value), ensure_ascii=False)
