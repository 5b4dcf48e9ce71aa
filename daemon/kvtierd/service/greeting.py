"""What `kvtierd serve` says when it is ready, on its standard output and in its log."""

import contextlib
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvtierd.cache import Snapshot
from kvtierd.config.daemon import SOCKET_NAME, Config
from kvtierd.config.settings import human_size, runtime_directory, size_and_parts
from kvtierd.logs import logger
from kvtierd.memory.host_pool import PoolStart

VLLM_CONFIG = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""The settings for an engine that finds the socket by itself, as the README has them."""

RUN_USER = Path("/run/user")
"""The folder in which systemd makes a runtime directory for each user who is logged in."""

log = logger(__name__)


def version() -> str:
    return importlib.metadata.version("kvtier")


def command_line() -> str:
    """The command line of this process, as a person would type it."""
    return shlex.join(["kvtierd", *sys.argv[1:]])


def vllm_flag(config: Config, environ: Mapping[str, str] = os.environ, uid: int | None = None) -> str:
    """The flag to add to vLLM's command line, quoted for any shell. It names the socket unless every engine
    of this user finds it by itself."""
    given: dict[str, object] = dict(VLLM_CONFIG)
    if not _is_found(config, environ, os.getuid() if uid is None else uid):
        given["kv_connector_extra_config"] = {"socket": str(config.server.socket_path)}
    return f"--kv-transfer-config {shlex.quote(json.dumps(given, separators=(',', ':'), ensure_ascii=False))}"


def _is_found(config: Config, environ: Mapping[str, str], uid: int) -> bool:
    """Whether an engine looks for the socket there without being told. Engines may be started where variables
    differ from those of this process, so the default counts only if it is also that of a login of this user:
    systemd's runtime directory if there is one, and else the one that is used without XDG_RUNTIME_DIR."""
    if config.server.group:  # engines of other users look elsewhere
        return False
    of_logins = RUN_USER / str(uid)
    login = {"XDG_RUNTIME_DIR": str(of_logins)} if of_logins.is_dir() else {}
    default = runtime_directory(login, uid) / SOCKET_NAME
    return config.server.socket_path == default and runtime_directory(environ, uid) == default.parent


def greet(
    config: Config,
    socket: Path,
    metrics_url: str,
    remote_port: int,
    start: PoolStart,
    snapshot: Snapshot,
) -> None:
    """Prints and logs where the daemon serves, what it found in its pool, and the flag to give to vLLM.
    `remote_port`: the port for other hosts; 0 if there is none."""
    how = (
        f"warm: {start.recovered_blocks} blocks, {human_size(start.recovered_bytes)} found"
        if start.warm
        else f"cold: {start.cold_reason}"
    )
    pool = snapshot.pool
    size = size_and_parts(pool.size_bytes, pool.file_bytes, pool.capacity_bytes)
    if pool.populated_bytes < pool.capacity_bytes:
        size += f", {human_size(pool.populated_bytes)} of it at once, the rest as it gets memory"
    lines = (
        f"kvtierd {version()} is serving, pid {os.getpid()}",
        f"  socket   {socket}",
        f"  pool     {config.pool.file or 'anonymous memory'}, {size}",
        f"  start    {how} ({start.seconds:.2f} s)",
        *(f"  {line}" for line in _disk_lines(snapshot)),
        f"  metrics  {metrics_url or 'off'}",
        *([f"  remote   {_remote_line(config, remote_port)}"] if remote_port else []),
        f"  vLLM     {vllm_flag(config)}",
    )
    with contextlib.suppress(OSError):  # nobody reads standard output any more
        print("\n".join(lines), flush=True)
    log.info(
        "serving",
        version=version(),
        pid=os.getpid(),
        socket=socket,
        pool=config.pool.file or "",
        pool_size=human_size(pool.size_bytes),
        start="warm" if start.warm else "cold",
        metrics=metrics_url,
    )


def _remote_line(config: Config, port: int) -> str:
    host = config.remote.listen.rpartition(":")[0]
    return f"{host}:{port}, {'without TLS' if config.remote.insecure else 'mutual TLS'}, read-only"


def _disk_lines(snapshot: Snapshot) -> Iterator[str]:
    for disk in snapshot.disks:
        room = human_size(disk.capacity_bytes)
        if disk.shared and disk.state == "live":
            how = f"of which {room} are remembered here"
        elif disk.state == "starting":
            how = "starting: it joins as soon as it is ready"
        elif disk.state != "live":
            how = f"off: {disk.why}"
        elif disk.cold_reason:
            how = f"cold: {disk.cold_reason}"
        else:
            how = f"warm: {disk.recovered_blocks} blocks, {human_size(disk.recovered_bytes)} found"
        encrypted = ", encrypted" if disk.encrypted else ""
        if disk.shared:
            yield f"store    {disk.path}, {how}"
        else:
            yield f"disk     {disk.path}, {room}{encrypted}, {how}"
