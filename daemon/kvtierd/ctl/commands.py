"""The `kvtierctl` command: what operators ask a running daemon."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import click
import grpc
from kvtier.connection import reach
from kvtier.connection.rpc_errors import from_rpc_error
from kvtier.v1 import admin_pb2, admin_pb2_grpc
from rich.text import Text

from kvtierd.cli import interrupts
from kvtierd.cli.socket_option import SOCKET_HELP, socket_options
from kvtierd.config import daemon as configuration
from kvtierd.config import settings
from kvtierd.core.errors import Reason
from kvtierd.core.ids import HASH_BYTES_MAX
from kvtierd.ctl.caller import admin_at
from kvtierd.ctl.clear import cleared, question
from kvtierd.ctl.comparison import compared, comparison_json, comparison_page, read_namespaces
from kvtierd.ctl.engine import EngineCheck, verdict
from kvtierd.ctl.engine_http import EngineServer, server_of
from kvtierd.ctl.explanation import block_sizes, explained, known, relevance
from kvtierd.ctl.host import completion, doctor
from kvtierd.ctl.lists import engines as list_engines
from kvtierd.ctl.lists import namespaces as list_namespaces
from kvtierd.ctl.messages import as_plain, to_json, to_json_list
from kvtierd.ctl.remote import remote
from kvtierd.ctl.simulate import simulate
from kvtierd.ctl.status import page as status_page
from kvtierd.ctl.terminal import console, plain, show, whole_screen
from kvtierd.ctl.text import count, drained, reloaded, scrub_line, scrubbed
from kvtierd.ctl.top import WIDTH, Top
from kvtierd.rpc.contract import ERROR_METADATA

TIMEOUT_S = 5.0
CLEAR_S = 60.0
"""How long the daemon may take to drop millions of blocks while it serves engines."""
EXIT_CORRUPT = 1
EXIT_NOT_PROVEN = 1
EXIT_USAGE = 2
EXIT_CANNOT_WRITE = 1
EXIT_NO_DAEMON = 69
EXIT_NOT_YET = 75
"""The exit status if something was not done and is worth another try (sysexits.h EX_TEMPFAIL)."""
END_GRACE_S = 30.0
"""How long a daemon that has announced its stop may take to end its sessions and copy workers."""
END_POLL_S = 0.02
SCRUB_POLL_S = 0.2
CHANNEL_OPTIONS = (("grpc.max_reconnect_backoff_ms", 1000), ("grpc.max_receive_message_length", 64 << 20))
"""For `top`, which waits for a daemon that comes back."""
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
SHOWN_MAX = 80
"""How many characters of a wrong argument are repeated in the error message."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvtier", prog_name="kvtierctl")
@socket_options(SOCKET_HELP)
def main() -> None:
    """Look at a running kvtierd, and at the host it is to run on.

    Exit status: 0 well; 1 something is wrong with what was looked at (doctor, scrub, bench, check-engine); 2
    the command line is wrong; 69 no daemon answers, or it has refused; 75 not done, or not wholly, try again;
    78 the configuration cannot be used; 130 interrupted.
    """


main.add_command(doctor)
main.add_command(completion)
main.add_command(remote)
main.add_command(simulate)


_socket_option = socket_options(SOCKET_HELP, expose=True)


def _timeout_option(
    default_s: float, text: str, *, most_s: float, least_s: float = 0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(least_s, most_s),
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=text,
    )


@main.command()
@_socket_option
@click.option("--json", "as_json", is_flag=True, help="Print kvtier.v1.StatusResponse as JSON.")
def status(socket: Path | None, as_json: bool) -> None:
    """Show the pool, the engines attached, the copy workers and the traffic."""
    with _admin(_path(socket)) as admin:
        response = _status(admin)
    if as_json:
        click.echo(to_json(response))
    else:
        show(status_page(response))


@main.command()
@_socket_option
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two frames.",
)
@click.option("--frames", type=click.IntRange(1), help="How many to show; default: until Ctrl-C.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print each kvtier.v1.StatusResponse as a line of JSON."
)
def top(socket: Path | None, interval_s: float, frames: int | None, as_json: bool) -> None:
    """Show what happens now: rates and their history, engines, workers and disks; Ctrl-C ends it.

    A daemon that ends is waited for, except with --frames.

    On a terminal each frame replaces the one before; with --frames, the last one stays. Elsewhere frames are
    printed one after another, without colours, 80 columns wide or as wide as COLUMNS says.
    """
    picture, terminal, path = Top(interval_s), console(), _path(socket)
    waiting = f"no daemon answers at {path}; waiting for one (Ctrl-C ends this)"
    known, shown = False, 0
    updates = terminal.is_terminal and not terminal.is_dumb_terminal and sys.stdout.isatty() and not as_json
    interrupts.instead("", 0)  # this command is meant to be ended by a signal
    with _admin(path) as admin, whole_screen(terminal) if updates else nullcontext():
        while shown != frames:
            if shown:
                time.sleep(interval_s)
            try:
                answer = _status(admin)
            except grpc.RpcError as error:
                if not shown or frames or error.code() not in AWAY:
                    raise
                if updates:
                    terminal.update_screen(Text(waiting))
                elif known:
                    click.echo(f"kvtierctl: {waiting}", err=True)
                known = False
                continue
            known, shown = True, shown + 1
            picture.add(answer, time.monotonic())
            if as_json:
                click.echo(json.dumps(as_plain(answer)))
            elif updates:
                terminal.update_screen(picture.page(terminal.width, terminal.height))
            else:
                width = (
                    int(os.environ.get("COLUMNS", "")) if os.environ.get("COLUMNS", "").isdecimal() else WIDTH
                )
                click.echo(plain(picture.page(width), width))
    if updates:
        show(picture.page(terminal.width, terminal.height))


@main.command()
@_socket_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of kvtier.v1.InstanceStatus.")
def engines(socket: Path | None, as_json: bool) -> None:
    """List the engines that are attached, their processes, and what they hold."""
    with _admin(_path(socket)) as admin:
        response = _status(admin)
    if as_json:
        click.echo(to_json_list(response.instances))
    else:
        show(list_engines(response))


@main.command()
@_socket_option
@click.option("--namespace", default="", metavar="DIGEST", help="Its digest, or how it begins; default: all.")
@click.option("--fields", is_flag=True, help="With what engines have said of each.")
@click.option(
    "--compare",
    type=click.File("rb"),
    metavar="FILE",
    help="With what `kvtierctl namespaces --json` has printed on another host (-: standard input): which of "
    "them the two share, and in which fields the others differ.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print kvtier.v1.ListNamespacesResponse as JSON, with --compare a list of its own.",
)
def namespaces(
    socket: Path | None, namespace: str, fields: bool, compare: BinaryIO | None, as_json: bool
) -> None:
    """List the namespaces that engines use, or that blocks are there of, and how many blocks."""
    there = None
    if compare is not None:
        try:
            there = read_namespaces(compare)
        except ValueError as error:
            raise click.BadParameter(
                f"it is not what `kvtierctl namespaces --json` prints on another host: {error}",
                param_hint="--compare",
            ) from None
    with _admin(_path(socket)) as admin:
        response = _namespaces(admin, namespace.lower())
    if there is not None:
        found = compared(response, there)
        if as_json:
            click.echo(comparison_json(found))
        else:
            show(comparison_page(found, there))
    elif as_json:
        click.echo(to_json(response))
    else:
        show(list_namespaces(response, namespace, fields))


@main.command()
@_socket_option
@click.option("--for-restart", is_flag=True, help="Stop the daemon, once nothing is under way any more.")
@_timeout_option(
    150.0, "How long to wait for transfers; none takes longer than limits.transfer_deadline_s.", most_s=86_400
)
@click.option("--json", "as_json", is_flag=True, help="Print the last kvtier.v1.DrainProgress as JSON.")
def drain(socket: Path | None, for_restart: bool, timeout_s: float, as_json: bool) -> None:
    """Take nothing new, and wait until what runs has ended.

    Engines go on: their lookups miss, their stores are refused. The daemon stays like this until `kvtierctl
    resume`, or until it is stopped; with --for-restart it stops by itself, with exit status 0, and nothing
    that it has stored is lost. Exit status 75: transfers were still running when the time was up, or somebody
    has resumed it; nothing was stopped.
    """
    path = _path(socket)
    lock_before = _identity(configuration.lock_of(path))
    request = admin_pb2.DrainRequest(for_restart=for_restart, timeout_ms=round(timeout_s * 1000))
    progress = admin_pb2.DrainProgress()
    told = -1
    with _admin(path, timeout_s + TIMEOUT_S) as admin:
        for progress in admin.Drain(request, timeout=timeout_s + TIMEOUT_S, wait_for_ready=False):
            interrupts.instead(
                "kvtierctl: interrupted: the daemon goes on draining; `kvtierctl resume` takes that back"
            )
            if progress.state == "waiting" and progress.transfers_active != told:
                told = progress.transfers_active
                what = count(told, "transfer") if told else "blocks that a disk is reading"
                click.echo(f"waiting for {what}", err=as_json)
        if progress.state == "stopping":
            interrupts.instead("kvtierctl: interrupted: the daemon is stopping all the same")
            _wait_gone(path, lock_before)
    click.echo(to_json(progress) if as_json else "\n".join(drained(progress)))
    if progress.state not in ("drained", "stopping"):
        sys.exit(EXIT_NOT_YET)


@main.command()
@_socket_option
@click.option("--json", "as_json", is_flag=True, help="Print kvtier.v1.ResumeResponse as JSON.")
def resume(socket: Path | None, as_json: bool) -> None:
    """Take `drain` back: stores, loads and new engines are accepted again."""
    with _admin(_path(socket)) as admin:
        response = admin.Resume(admin_pb2.ResumeRequest(), timeout=TIMEOUT_S, wait_for_ready=False)
    said = "serving again" if response.was_draining else "serving; it was not draining"
    click.echo(to_json(response) if as_json else said)


@main.command()
@_socket_option
@_timeout_option(
    86_400.0, "How long to wait; the disks do it only while they have nothing else to do.", most_s=1e6
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the last kvtier.v1.DiskStatus of each disk as JSON."
)
def scrub(socket: Path | None, timeout_s: float, as_json: bool) -> None:
    """Compare every block on the disks with its checksum, and wait for it.

    Exit status 1: blocks were corrupt; they are not served, and their places are used no more. Exit status
    75: not everything was looked at, because the time was up or a disk cannot be used.
    """
    deadline_s = time.monotonic() + timeout_s
    told: dict[str, str] = {}
    with _admin(_path(socket)) as admin:

        def disks() -> dict[str, admin_pb2.DiskStatus]:
            return {disk.path: disk for disk in _status(admin).disks if not disk.shared}

        before = disks()
        admin.Scrub(admin_pb2.ScrubRequest(), timeout=TIMEOUT_S, wait_for_ready=False)
        interrupts.instead(
            "kvtierctl: interrupted: the disks go on with it; `kvtierctl status` says how far they are"
        )
        now = disks()
        while waiting := [each for each in now.values() if each.state == "live" and not _is_scrubbed(each)]:
            for disk in waiting:
                if told.get(disk.path) != (line := scrub_line(disk)):
                    told[disk.path] = line
                    click.echo(line, err=as_json)
            if time.monotonic() >= deadline_s:
                break
            time.sleep(SCRUB_POLL_S)
            now = disks()
    found = {path: disk.corrupt_blocks - before[path].corrupt_blocks for path, disk in now.items()}
    click.echo(to_json_list(now.values()) if as_json else "\n".join(scrubbed(now.values(), found)))
    if any(found.values()):
        sys.exit(EXIT_CORRUPT)
    if not all(each.state == "live" and _is_scrubbed(each) for each in now.values()):
        sys.exit(EXIT_NOT_YET)


def _is_scrubbed(disk: admin_pb2.DiskStatus) -> bool:
    return disk.scrubbed_blocks >= disk.scrub_blocks


@main.command()
@_socket_option
@click.option("--namespace", metavar="DIGEST", help="Its digest, or how it begins; default: all of them.")
@click.option("--yes", is_flag=True, help="Do not ask; needed where nobody can be asked.")
@_timeout_option(60.0, "How long to wait for disks to keep it.", most_s=86_400)
@click.option("--json", "as_json", is_flag=True, help="Print kvtier.v1.ClearResponse as JSON.")
def clear(socket: Path | None, namespace: str | None, yes: bool, timeout_s: float, as_json: bool) -> None:
    """Drop cached blocks, of all namespaces or of one, from memory and from disks.

    Engines go on, and compute what they miss. Blocks that are leased or under way stay, and are counted. What
    was dropped does not come back, whatever happens to the daemon.

    On a terminal it asks first, and drops nothing unless the answer is yes. Without one, and with --json, it
    drops nothing without --yes. Exit status 2: --yes is missing; 75: a disk does not keep it yet, or the
    answer was no.
    """
    if namespace == "":  # a script's variable that is not set must not mean everything
        raise click.BadParameter(
            "name a namespace, or leave the option out for all", param_hint="--namespace"
        )
    interrupts.instead("kvtierctl: interrupted: nothing was dropped")
    if not yes and (as_json or not _can_ask()):
        click.echo("kvtierctl: nothing was dropped: nobody can be asked here; add --yes to drop it", err=True)
        sys.exit(EXIT_USAGE)
    chosen = (namespace or "").lower()
    with _admin(_path(socket), timeout_s + CLEAR_S) as admin:
        if not yes:
            found = _namespaces(admin, chosen)
            if not _confirmed(question(found, chosen)):
                click.echo("kvtierctl: nothing was dropped", err=True)
                sys.exit(EXIT_NOT_YET)
        interrupts.instead("kvtierctl: interrupted: some blocks may have been dropped already")
        request = admin_pb2.ClearRequest(namespace=chosen, timeout_ms=round(timeout_s * 1000))
        answer = admin.Clear(request, timeout=timeout_s + CLEAR_S, wait_for_ready=False)
    click.echo(to_json(answer) if as_json else "\n".join(cleared(answer)))
    if answer.unsettled_paths:
        sys.exit(EXIT_NOT_YET)


def _can_ask() -> bool:
    """Whether standard input is a terminal, where somebody can answer."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _confirmed(question: str) -> bool:
    """Asks a question. Only y and yes mean yes; any other answer, and the end of the input, mean no."""
    click.echo(f"{question} [y/N]: ", err=True, nl=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@main.command("bench")
@_socket_option
@click.option("--size", help="How much to store; default: 64MiB, or an eighth of the pool if that is less.")
@click.option("--block", default="256KiB", show_default=True, help="Bytes of one block.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def measure(socket: Path | None, size: str | None, block: str, as_json: bool) -> None:
    """Measure the daemon that runs: stores, loads, lookups, as an engine without a GPU would see them.

    In a namespace of its own, which is cleared afterwards. Where the pool has no free room, what is oldest
    makes room for it. Exit status 1: bytes came back wrong; 69: it could not be measured; 75: something could
    not be cleared yet.
    """
    # Imported only here, because no other command needs the client.
    from kvtierd.ctl.bench import WAIT_S, BenchError, bench
    from kvtierd.ctl.bench import lines as bench_lines

    size_bytes = None if size is None else _size("--size", size)
    block_bytes = _size("--block", block)
    path = _path(socket)
    with _admin(path, 2 * WAIT_S) as admin:
        stop = interrupts.Noted(signal.SIGINT, signal.SIGTERM, patience=1)
        try:
            figures = bench(path, admin, size_bytes, block_bytes, stop.check)
        except interrupts.StoppedEarly as error:
            click.echo("kvtierctl: interrupted; what was stored for it is cleared", err=True)
            sys.exit(error.status)
        except BenchError as error:
            click.echo(f"kvtierctl: {error}", err=True)
            sys.exit(EXIT_NO_DAEMON)
    click.echo(json.dumps(asdict(figures), indent=2) if as_json else "\n".join(bench_lines(figures)))
    if figures.wrong_blocks:
        sys.exit(EXIT_CORRUPT)
    if figures.left_blocks:
        sys.exit(EXIT_NOT_YET)


@main.command("check-engine")
@click.argument("url")
@_socket_option
@click.option("--model", help="One that the server serves; default: its first that is no adapter.")
@click.option("--api-key", envvar="VLLM_API_KEY", default="", help="If the server wants one. [VLLM_API_KEY]")
@_timeout_option(
    30.0, "How long to wait for each answer, and for each thing that is to happen.", least_s=1, most_s=3_600
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as a JSON object.")
def check_engine(
    url: str, socket: Path | None, model: str | None, api_key: str, timeout_s: float, as_json: bool
) -> None:
    """Prove that a running vLLM stores in kvtierd and loads from it. URL is where it serves:
    http://127.0.0.1:8000.

    A new prompt is sent, and sent again after the engine was told to forget its own prefix cache. It forgets
    that of other requests too, and has them from kvtierd then. Its last block may be computed all the same,
    for an audit (`audit_rate`). This takes an engine with VLLM_SERVER_DEV_MODE=1 in its environment. Exit
    status 1: not proven, and why; 69: no daemon answers.
    """
    try:
        server = EngineServer(server_of(url), api_key, timeout_s)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="URL") from None
    path = _path(socket)

    def say(line: str) -> None:
        if not as_json:
            click.echo(line)

    try:
        with admin_at(path) as admin:
            check = EngineCheck(server, admin, path, timeout_s, say)
            proof, status = check.run(model), 0
    except grpc.RpcError as error:
        proof, status = check.proof, EXIT_NO_DAEMON
        proof.why_not = explain(path, error)
        proof.advice = "start kvtierd, or name the socket that the engine uses with --socket"
    click.echo(json.dumps(asdict(proof), indent=2) if as_json else "\n".join(verdict(proof)))
    sys.exit(status or (0 if proof.proven else EXIT_NOT_PROVEN))


@main.command()
@_socket_option
@click.option("--json", "as_json", is_flag=True, help="Print kvtier.v1.ReloadResponse as JSON.")
def reload(socket: Path | None, as_json: bool) -> None:
    """Have the daemon read its configuration again, and take over what can change while it runs.

    Exit status 75: some settings take a restart (`kvtierctl drain --for-restart`), the others are in force.
    Exit status 69: the configuration cannot be used, and nothing has changed.
    """
    with _admin(_path(socket)) as admin:
        response = admin.Reload(admin_pb2.ReloadRequest(), timeout=TIMEOUT_S, wait_for_ready=False)
    click.echo(to_json(response) if as_json else "\n".join(reloaded(response)))
    if response.needs_restart:
        sys.exit(EXIT_NOT_YET)


@main.command("record")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@_socket_option
@click.option("--for", "period", metavar="TIME", help="Stop after so long: 90s, 10min, 1h; default: Ctrl-C.")
@click.option("--file-bytes", default="64MiB", show_default=True, metavar="SIZE", help="At most, of a file.")
@click.option(
    "--total-bytes",
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="The most of all; the oldest files are removed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as a JSON object.")
def record_events(
    folder: Path, socket: Path | None, period: str | None, file_bytes: str, total_bytes: str, as_json: bool
) -> None:
    """Record what engines look up and store, for `kvtierctl simulate FOLDER`.

    Written are times, sizes, hits, numbers that stand for tenants and groups, and a keyed hash of each block,
    whose key is written nowhere: no tokens, no names. Engines never wait for it; what it cannot take in time
    is dropped and counted. Ctrl-C ends it within two seconds. Exit status 1: it cannot write there; 69: the
    daemon refused, or has ended, and what had come is written.
    """
    # Imported only here, because no other command needs it.
    from kvtierd.ctl import recorder

    try:
        for_s = None if period is None else recorder.period_s(period)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--for") from None
    most = (_size("--file-bytes", file_bytes), _size("--total-bytes", total_bytes))
    path = _path(socket)
    live = sys.stderr.isatty() and not as_json

    def tell(line: str) -> None:
        if live:
            click.echo(f"\r{line}\x1b[K", err=True, nl=False)

    with _admin(path, 2 * TIMEOUT_S) as admin:
        stop = interrupts.Noted(signal.SIGINT, signal.SIGTERM, patience=2)
        call = admin.Record(admin_pb2.RecordRequest(), wait_for_ready=False)
        next(call)  # it has begun, or this raises
        try:
            writer = recorder.RecordWriter(folder, *most)
            stream = recorder.BatchStream(call)
            tell("recording; Ctrl-C ends it")
            recorder.record(stream, writer, for_s, lambda: stop.noted, tell)
        except ValueError as error:
            call.cancel()
            click.echo(f"kvtierctl: {error}", err=True)
            sys.exit(EXIT_USAGE)
        except OSError as error:
            call.cancel()
            message = f"cannot write to {folder}: {error}; make room there, or name another folder"
            click.echo(f"kvtierctl: {message}", err=True)
            sys.exit(EXIT_CANNOT_WRITE)
    if live:
        click.echo("\r\x1b[K", err=True, nl=False)
    click.echo(json.dumps(writer.figures(), indent=2) if as_json else "\n".join(writer.lines()))
    if stream.error is not None:
        click.echo(f"kvtierctl: {explain(path, stream.error)}", err=True)
        sys.exit(EXIT_NO_DAEMON)


@main.command("explain")
@click.argument("block_hash", metavar="HASH")
@_socket_option
@click.option("--namespace", default="", metavar="DIGEST", help="Its digest, or how it begins; default: all.")
@click.option("--group", type=click.IntRange(0, 2**32 - 1), help="One group of the namespace; default: all.")
@click.option("--json", "as_json", is_flag=True, help="kvtier.v1.ExplainResponse as JSON; a list for -.")
def explain_block(
    block_hash: str, socket: Path | None, namespace: str, group: int | None, as_json: bool
) -> None:
    """Say why a block can be read, or cannot. HASH is the block's hash in hexadecimal; "-": one a line on
    standard input, as `python -m kvtier_vllm.hashes` prints those of a prompt's token ids.

    Every namespace that begins with DIGEST is answered for. What happened before the daemon started, or too
    long ago, is not known: then it says so. Exit status 0: it is explained, also where nothing is stored at
    all; 2: HASH is no block hash, or has another length than those of the namespaces; 69: no known namespace
    begins so.
    """
    several = block_hash == "-"
    keys = [_block_hash(text) for text in (sys.stdin.read().split() if several else [block_hash])]
    responses, hint = [], ""
    with _admin(_path(socket)) as admin:
        for key in keys:
            request = admin_pb2.ExplainRequest(hash=key, namespace=namespace.lower(), group=group)
            try:
                responses.append(admin.Explain(request, timeout=TIMEOUT_S, wait_for_ready=False))
            except grpc.RpcError as error:
                refusal = from_rpc_error(error)
                if refusal is None or refusal.reason != Reason.HASH_LENGTH:
                    raise
                raise click.BadParameter(refusal.message, param_hint="HASH") from None
        used = {each.namespace_digest for each in _status(admin).instances}
        if several and not as_json and not known(responses):
            hint = block_sizes(_namespaces(admin, namespace.lower()).namespaces)
    if as_json:
        for response in responses:
            response.explanations.sort(key=lambda each: relevance(each, used))
        click.echo(to_json_list(responses) if several else to_json(responses[0]))
        return
    if not keys:
        click.echo("there is no hash on standard input; a prompt that is shorter than one block has none")
        return
    show(explained(responses, None if namespace else used))
    if hint:
        click.echo(hint)


def _block_hash(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if 1 <= len(key) <= HASH_BYTES_MAX:
        return key
    digits, shown = 2 * HASH_BYTES_MAX, text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    raise click.BadParameter(
        f"{shown!r} is no block hash: write its bytes in hexadecimal, two digits each, "
        f"{digits} digits at most",
        param_hint="HASH",
    )


def _size(option: str, text: str) -> int:
    try:
        return settings.size(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


@contextmanager
def _admin(path: Path, longest_s: float = TIMEOUT_S) -> Iterator[admin_pb2_grpc.AdminStub]:
    """Gives the calls of the daemon at this socket. A call that fails is explained on standard error, and
    ends the program. `longest_s`: how long a call may take; that nobody answers at all is known sooner."""
    waited_s = TIMEOUT_S
    try:
        with admin_at(path, CHANNEL_OPTIONS) as admin:
            if longest_s > TIMEOUT_S:
                _status(admin)
            waited_s = longest_s
            yield admin
    except grpc.RpcError as error:
        click.echo(f"kvtierctl: {explain(path, error, waited_s)}", err=True)
        sys.exit(EXIT_NO_DAEMON)


def _status(admin: admin_pb2_grpc.AdminStub) -> admin_pb2.StatusResponse:
    return admin.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S, wait_for_ready=False)


def _namespaces(admin: admin_pb2_grpc.AdminStub, namespace: str) -> admin_pb2.ListNamespacesResponse:
    request = admin_pb2.ListNamespacesRequest(namespace=namespace)
    return admin.ListNamespaces(request, timeout=TIMEOUT_S, wait_for_ready=False)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _wait_gone(path: Path, lock_before: tuple[int, int] | None) -> None:
    """Waits until the daemon has released its sockets, so that another one can be started at once."""
    deadline_s = time.monotonic() + END_GRACE_S
    while lock_before is not None and _identity(configuration.lock_of(path)) == lock_before:
        if time.monotonic() > deadline_s:
            click.echo(f"kvtierctl: it says that it stops, but still owns {path}: see its log", err=True)
            sys.exit(EXIT_NOT_YET)
        time.sleep(END_POLL_S)


def _path(socket: Path | None) -> Path:
    """The socket that was named, or else the configured one. Where one was named, the rest of the
    configuration does not matter, so variables that are none of ours are only warned of."""
    try:
        if (named := socket or configuration.named_socket()) is None:
            return configuration.load().config.server.socket_path
        for line in configuration.unknown_variables():
            click.echo(f"kvtierctl: warning: {line}", err=True)
        return named
    except settings.ConfigError as error:
        click.echo(f"kvtierctl: {error}", err=True)
        sys.exit(78)


def explain(path: Path, error: grpc.RpcError, waited_s: float = TIMEOUT_S) -> str:
    """Says why a call failed, and what an operator can do. `waited_s`: the call's deadline."""
    code = getattr(error, "code", lambda: None)()  # the library's types do not say that every error has one
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return (
            f"the daemon at {path} did not answer in {waited_s:g} s: it is stopped, hangs or is overloaded; "
            "`kvtierctl doctor` names its process, and its log says what it did last (journalctl -u kvtierd)"
        )
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    if any(key == ERROR_METADATA for key, _ in metadata):  # the daemon's own words
        return str(getattr(error, "details", lambda: error)())
    said = getattr(error, "details", lambda: error)()
    if code is not grpc.StatusCode.UNAVAILABLE:
        return f"the daemon at {path} did not do it: {getattr(code, 'name', 'no reason')}, {said}"
    found = reach.look(path)
    if found.reach is reach.Reach.MISSING:
        return f"no daemon: {path} {found.detail}; start `kvtierd serve`, or name its socket with --socket"
    if found.reach is reach.Reach.NOBODY:
        return f"no daemon answers at {path}, which {found.detail}; start one with `kvtierd serve`"
    if found.reach is not reach.Reach.LISTENS:
        return found.text
    return f"somebody listens at {path}, and does not answer as kvtierd does: {said}"
