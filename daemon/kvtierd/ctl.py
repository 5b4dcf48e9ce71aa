"""The `kvtierctl` command: what operators ask of a running daemon."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import grpc
from google.protobuf.message import Message
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from kvtierd import config as configuration
from kvtierd import settings
from kvtierd.settings import human_size

TIMEOUT_S = 5.0
CPU = "cpu"
"""What a StatusResponse calls the device that is the host itself."""
EXIT_NO_DAEMON = 69


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvtier", prog_name="kvtierctl")
def main() -> None:
    """Look at a running kvtierd."""


@main.command()
@click.option(
    "--socket", type=click.Path(path_type=Path), help="Its gRPC socket; default: where kvtierd puts it."
)
@click.option("--json", "as_json", is_flag=True, help="Print kvtier.v1.StatusResponse as JSON.")
def status(socket: Path | None, as_json: bool) -> None:
    """Show the pool, the engines attached, the copy workers and the traffic."""
    path = socket or _configured_socket()
    try:
        with grpc.insecure_channel(f"unix:{path.absolute()}") as channel:
            response = admin_pb2_grpc.AdminStub(channel).Status(
                admin_pb2.StatusRequest(), timeout=TIMEOUT_S, wait_for_ready=False
            )
    except grpc.RpcError as error:
        click.echo(f"kvtierctl: {explain(path, error)}", err=True)
        sys.exit(EXIT_NO_DAEMON)
    click.echo(to_json(response) if as_json else "\n".join(lines(response)))


def _configured_socket() -> Path:
    try:
        return configuration.load().config.server.socket_path
    except settings.ConfigError as error:
        click.echo(f"kvtierctl: {error}", err=True)
        sys.exit(78)


def explain(path: Path, error: grpc.RpcError) -> str:
    """What an operator should do about a call that failed."""
    code = getattr(error, "code", lambda: None)()  # the library's types do not say that every error has one
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the daemon at {path} does not answer within {TIMEOUT_S:g} s: it is stopped or overloaded"
    if not path.exists():
        return f"no daemon: {path} does not exist; start `kvtierd serve`, or name its socket with --socket"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"no daemon answers at {path}, or you may not use it; start one with `kvtierd serve`"
    return f"{path}: {error}"


def to_json(response: admin_pb2.StatusResponse) -> str:
    """One JSON object: every field of the contract by its name there, numbers as numbers."""
    return json.dumps(_plain(response), indent=2)


def _plain(message: Message) -> dict[str, object]:
    plain: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            plain[field.name] = _plain(value)
        elif isinstance(value, (str, int, float)):
            plain[field.name] = value
        else:
            plain[field.name] = [_plain(item) if isinstance(item, Message) else item for item in value]
    return plain


def lines(status: admin_pb2.StatusResponse) -> Iterator[str]:
    """The status for people."""
    pool, blocks, counters = status.pool, status.blocks, status.counters
    yield f"kvtierd {status.version}  {status.state}  pid {status.pid}  up {duration(status.uptime_s)}"
    yield f"  socket     {status.socket}"
    yield f"  metrics    {status.metrics_url or 'off'}"
    yield ""
    share = pool.used_bytes / pool.capacity_bytes if pool.capacity_bytes else 0.0
    yield f"Pool         {pool.path or 'anonymous memory'}"
    yield (
        f"  used       {bar(share)} {share:4.0%}  "
        f"{human_size(pool.used_bytes)} of {human_size(pool.capacity_bytes)}"
    )
    yield f"  blocks     {blocks.ready:,} ready, {blocks.writing:,} writing, {blocks.evicting:,} evicting"
    yield f"  extents    {pool.extents - pool.extents_free:,} assigned, {pool.extents_free:,} free"
    if pool.start == "warm":
        found = f"{pool.recovered_blocks:,} blocks, {human_size(pool.recovered_bytes)}"
        yield f"  start      warm: {found} found in {pool.recovery_s:.2f} s"
    else:
        yield f"  start      cold: {pool.cold_reason}"
    if pool.quarantined_slots:
        yield f"  quarantine {pool.quarantined_slots:,} slots: their writers are not proved gone"
    yield ""
    hit_rate = counters.lookup_hits / counters.lookup_hashes if counters.lookup_hashes else 0.0
    yield "Traffic      since the start"
    yield (
        f"  lookups    {counters.lookups:,} of {counters.lookup_hashes:,} blocks, "
        f"{counters.lookup_hits:,} hit ({hit_rate:.1%})"
    )
    yield (
        f"  stored     {counters.stored_blocks:,} blocks, {human_size(counters.stored_bytes)}"
        f" (+ {counters.deduplicated_blocks:,} there already, {counters.throttled_blocks:,} refused for room)"
    )
    yield f"  loaded     {counters.loaded_blocks:,} blocks, {human_size(counters.loaded_bytes)}"
    yield f"  evicted    {counters.evicted_blocks:,} blocks"
    yield (
        f"  transfers  {status.transfers_active:,} active, {counters.failed_transfers:,} failed, "
        f"{counters.cancelled_transfers:,} cancelled"
    )
    yield (
        f"  leases     {status.leases:,} on {status.leased_blocks:,} blocks, "
        f"{counters.expired_leases:,} expired"
    )
    if counters.integrity_failures:
        yield f"  CORRUPT    {counters.integrity_failures:,} blocks failed their check and were not served"
    yield ""
    yield from _engines(status)
    yield ""
    yield from _workers(status)


def _engines(status: admin_pb2.StatusResponse) -> Iterator[str]:
    if not status.instances:
        yield "Engines      none attached"
        return
    yield "Engines"
    for instance in status.instances:
        state = "ready" if instance.ready else "incomplete" if instance.sessions else "ending"
        yield (
            f"  {instance.instance}  {state}  {instance.model}  world size {instance.world_size}, "
            f"{human_size(instance.mapped_bytes)} mapped, {instance.transfers_active:,} transfers, "
            f"{instance.leased_blocks:,} blocks leased"
        )
        for session in instance.sessions:
            attached = duration(session.attached_s)
            yield f"    {session.role:<21} pid {session.pid:<8} {attached:>8}  {session.client}"


def _workers(status: admin_pb2.StatusResponse) -> Iterator[str]:
    yield "Copy workers"
    width = max((len(worker.device) for worker in status.workers), default=0)
    for worker in status.workers:
        registered = f", {human_size(worker.registered_bytes)} of the pool registered"
        yield (
            f"  {worker.device:<{width}}  {worker.state:<8} pid {worker.pid}, "
            f"{human_size(worker.mapped_bytes)} mapped{registered if worker.device != CPU else ''}, "
            f"{worker.parts_active:,} parts active, replaced {worker.respawns:,} times"
        )


def bar(share: float, width: int = 20) -> str:
    full = min(width, round(share * width))
    return "█" * full + "░" * (width - full)


def duration(seconds: float) -> str:
    """3 s, 12 min 5 s, 2 h 4 min, 3 d 1 h."""
    whole = int(seconds)
    units = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    for name, size, lesser, lesser_size in units:
        if whole >= size:
            return f"{whole // size} {name} {whole % size // lesser_size} {lesser}"
    return f"{whole} s"


if __name__ == "__main__":
    main()
