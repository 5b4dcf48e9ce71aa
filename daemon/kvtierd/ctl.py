"""The `kvtierctl` command: what operators ask of a running daemon."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import grpc
from google.protobuf.message import Message
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from kvtierd import config as configuration
from kvtierd import settings
from kvtierd.rpc.errors import ERROR_METADATA
from kvtierd.settings import human_size

TIMEOUT_S = 5.0
CPU = "cpu"
"""What a StatusResponse calls the device that is the host itself."""
EXIT_NO_DAEMON = 69
EXIT_NOT_YET = 75
"""Not done, and worth trying again (sysexits.h EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130
END_GRACE_S = 30.0
"""For a daemon that has said that it stops: it ends its sessions and its copy workers first."""
END_POLL_S = 0.02


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvtier", prog_name="kvtierctl")
def main() -> None:
    """Look at a running kvtierd."""


_socket_option = click.option(
    "--socket", type=click.Path(path_type=Path), help="Its gRPC socket; default: where kvtierd puts it."
)


@main.command()
@_socket_option
@click.option("--json", "as_json", is_flag=True, help="Print kvtier.v1.StatusResponse as JSON.")
def status(socket: Path | None, as_json: bool) -> None:
    """Show the pool, the engines attached, the copy workers and the traffic."""
    with _admin(socket or _configured_socket()) as admin:
        response = admin.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S, wait_for_ready=False)
    click.echo(to_json(response) if as_json else "\n".join(lines(response)))


@main.command()
@_socket_option
@click.option("--for-restart", is_flag=True, help="Stop the daemon, once nothing is under way any more.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 86_400),
    default=150.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for transfers; none takes longer than limits.transfer_deadline_s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the last kvtier.v1.DrainProgress as JSON.")
def drain(socket: Path | None, for_restart: bool, timeout_s: float, as_json: bool) -> None:
    """Take nothing new, and wait until what runs has ended.

    Engines go on: their lookups miss, their stores are refused. The daemon stays like this until `kvtierctl
    resume`, or until it is stopped; with --for-restart it stops by itself, with exit status 0, and nothing
    that it has stored is lost. Exit status 75: transfers were still running when the time was up, or somebody
    has resumed it; nothing was stopped.
    """
    path = socket or _configured_socket()
    lock_before = _identity(configuration.lock_of(path))
    request = admin_pb2.DrainRequest(for_restart=for_restart, timeout_ms=round(timeout_s * 1000))
    progress = admin_pb2.DrainProgress()
    told = -1
    try:
        with _admin(path) as admin:
            for progress in admin.Drain(request, timeout=timeout_s + TIMEOUT_S, wait_for_ready=False):
                if progress.state == "waiting" and progress.transfers_active != told:
                    told = progress.transfers_active
                    click.echo(f"waiting for {_count(told, 'transfer')}", err=as_json)
            if progress.state == "stopping":
                _wait_gone(path, lock_before)
    except KeyboardInterrupt:
        click.echo("kvtierctl: the daemon goes on draining; `kvtierctl resume` takes that back", err=True)
        sys.exit(EXIT_INTERRUPTED)
    click.echo(to_json(progress) if as_json else "\n".join(drained(progress)))
    if progress.state not in ("drained", "stopping"):
        sys.exit(EXIT_NOT_YET)


@main.command()
@_socket_option
def resume(socket: Path | None) -> None:
    """Take `drain` back: stores, loads and new engines are accepted again."""
    with _admin(socket or _configured_socket()) as admin:
        response = admin.Resume(admin_pb2.ResumeRequest(), timeout=TIMEOUT_S, wait_for_ready=False)
    click.echo("serving again" if response.was_draining else "serving; it was not draining")


@main.command("explain")
@click.argument("block_hash", metavar="HASH")
@_socket_option
@click.option("--namespace", default="", metavar="DIGEST", help="Its digest, or how it begins; default: all.")
@click.option("--group", type=click.IntRange(0, 2**32 - 1), help="One group of the namespace; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print kvtier.v1.ExplainResponse as JSON.")
def explain_block(
    block_hash: str, socket: Path | None, namespace: str, group: int | None, as_json: bool
) -> None:
    """Say why a block can be read, or cannot. HASH is the block's hash in hexadecimal.

    What happened before the daemon started, or too long ago, is not known: then it says so.
    """
    try:
        key = bytes.fromhex(block_hash)
    except ValueError:
        raise click.BadParameter("write the block's hash in hexadecimal", param_hint="HASH") from None
    request = admin_pb2.ExplainRequest(hash=key, namespace=namespace.lower(), group=group)
    with _admin(socket or _configured_socket()) as admin:
        response = admin.Explain(request, timeout=TIMEOUT_S, wait_for_ready=False)
    click.echo(to_json(response) if as_json else "\n".join(explained(response)))


def explained(response: admin_pb2.ExplainResponse) -> Iterator[str]:
    """An explanation for people."""
    for each in response.explanations:
        yield f"namespace {each.namespace_digest}  {each.model or 'of an earlier daemon'}  group {each.group}"
        yield f"  {each.text}"
        for other in each.elsewhere:
            name = f"{other.namespace_digest}, group {other.group}"
            if not other.differences:
                yield f"  in {name}: what it was made of is not known any more"
                continue
            yield f"  in {name}, which differs in"
            for difference in other.differences:
                yield f"    {difference.field}: {_values(difference)}"
    if not response.explanations:
        yield "none of these namespaces has such a group"


def _values(difference: admin_pb2.Difference) -> str:
    if not difference.here and not difference.there:
        return "(not shown)"
    return f"{difference.here or 'none'} here, {difference.there or 'none'} there"


@contextmanager
def _admin(path: Path) -> Iterator[admin_pb2_grpc.AdminStub]:
    """Calls of a daemon; one that fails is explained, and ends the program."""
    try:
        with grpc.insecure_channel(f"unix:{path.absolute()}") as channel:
            yield admin_pb2_grpc.AdminStub(channel)
    except grpc.RpcError as error:
        click.echo(f"kvtierctl: {explain(path, error)}", err=True)
        sys.exit(EXIT_NO_DAEMON)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _wait_gone(path: Path, lock_before: tuple[int, int] | None) -> None:
    """Until the daemon has given up its sockets: then another may be started at once."""
    deadline_s = time.monotonic() + END_GRACE_S
    while lock_before is not None and _identity(configuration.lock_of(path)) == lock_before:
        if time.monotonic() > deadline_s:
            click.echo(f"kvtierctl: it says that it stops, but still owns {path}: see its log", err=True)
            sys.exit(EXIT_NOT_YET)
        time.sleep(END_POLL_S)


def drained(progress: admin_pb2.DrainProgress) -> Iterator[str]:
    """How a drain ended, for people, and what to do next."""
    kept = f"{_count(progress.kept_blocks, 'block')}, {human_size(progress.kept_bytes)}"
    match progress.state:
        case "stopping":
            yield f"kvtierd, pid {progress.pid}, has stopped; everything accepted was committed"
            yield f"  kept   {kept}, in {progress.pool_path}"
            yield f"  start  {progress.start_again}"
            yield "         with the same configuration file and environment; engines attach by themselves"
        case "drained":
            yield f"kvtierd, pid {progress.pid}, is drained: nothing is under way, and nothing new is taken"
            yield f"  holds  {kept}, in {progress.pool_path or 'anonymous memory, which ends with it'}"
            yield "  next   `kvtierctl resume`, or stop it: kill -TERM, systemctl stop"
        case "late":
            yield f"{_count(progress.transfers_active, 'transfer')} still active when the time was up"
            yield f"  kvtierd, pid {progress.pid}, goes on draining: wait again with the same command, or"
            yield "  take it back with `kvtierctl resume`; SIGTERM stops it and fails what is under way"
        case _:
            yield "somebody has resumed it meanwhile: it takes stores and loads again"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


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
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    if any(key == ERROR_METADATA for key, _ in metadata):  # its own words
        return str(getattr(error, "details", lambda: error)())
    if not path.exists():
        return f"no daemon: {path} does not exist; start `kvtierd serve`, or name its socket with --socket"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"no daemon answers at {path}, or you may not use it; start one with `kvtierd serve`"
    return f"{path}: {error}"


def to_json(response: Message) -> str:
    """One JSON object: every field of the contract by its name there, numbers as numbers."""
    return json.dumps(_plain(response), indent=2)


def _plain(message: Message) -> dict[str, object]:
    plain: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name) and not isinstance(value, Message):
            plain[field.name] = None
        elif isinstance(value, Message):
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
        yield (
            f"  start      warm: {found} found in {pool.recovery_s:.2f} s, "
            f"{_count(pool.discarded_slots, 'slot')} discarded"
        )
    else:
        yield f"  start      cold: {pool.cold_reason}"
    if pool.quarantined_slots:
        yield f"  quarantine {_count(pool.quarantined_slots, 'slot')}: their writers are not proved gone yet"
    yield from _integrity(status)
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
        by = status.integrity
        yield (
            f"  CORRUPT    {counters.integrity_failures:,} blocks failed their check and were not served: "
            f"{by.found_on_load:,} before a load, {by.found_after_restart:,} after a restart, "
            f"{by.found_in_sample:,} by sampling"
        )
    yield ""
    yield from _engines(status)
    yield ""
    yield from _workers(status)


def _integrity(status: admin_pb2.StatusResponse) -> Iterator[str]:
    """What sampling can be expected to find, and no more than that."""
    integrity = status.integrity
    when = "before every load" if integrity.verify == "always" else "before its first load after a restart"
    yield f"  verify     by record on every load; a block's data {when}"
    if integrity.sample_bytes_per_s:
        yield (
            f"  sampling   {human_size(integrity.sample_bytes_per_s)}/s at most: a block that has rotted is "
            f"found after {duration(max(1, math.ceil(integrity.expected_detection_s)))}"
        )
        yield (
            "             on average, longer while blocks are copied; until then a load can be given it"
            if integrity.verify != "always"
            else "             on average, longer while blocks are copied"
        )
        yield (
            f"             {_count(integrity.sampled_slots, 'slot')}, {human_size(integrity.sampled_bytes)} "
            "compared so far"
        )
    else:
        yield "  sampling   off"
    if integrity.corrupt_slots:
        yield (
            f"  corrupt    {_count(integrity.corrupt_slots, 'slot')} set aside: their memory has failed a "
            "check, and comes back with a cold start"
        )


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
