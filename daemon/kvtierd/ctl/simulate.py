"""The command `kvtierctl simulate`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from kvtierd.cli import interrupts
from kvtierd.config import settings
from kvtierd.ctl.terminal import show

T = TypeVar("T")
EXIT_USAGE, EXIT_FILE = 2, 1
CAPACITIES = "0.5%,1%,2%,5%,10%,25%,50%,100%"


@click.command()
@click.argument("trace", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option(
    "--place",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Of a recording with blocks of several tenants, models or groups; default: with most requests.",
)
@click.option(
    "--capacity",
    default=CAPACITIES,
    show_default=True,
    metavar="SIZES",
    help="How much is kept, separated by commas: in percent of the trace's different blocks, as a number of "
    "blocks, or in bytes.",
)
@click.option(
    "--disk",
    metavar="SIZE",
    help="How much a disk below keeps besides, written as a capacity; hits are those of both together.",
)
@click.option(
    "--policy",
    default="lru,reuse,optimum",
    show_default=True,
    metavar="NAMES",
    help="What decides what is kept.",
)
@click.option("--block-bytes", metavar="SIZE", help="What a block takes, for sizes in bytes; records say it.")
@click.option(
    "--prefill-rate",
    "prefill_tokens_per_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TOKENS",
    help="How many tokens a second the engine computes, to say what hits save.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Draw hit rate against capacity: a .png, .svg or .pdf.",
)
@click.option(
    "--html",
    "html_page",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write a page with the drawing and all figures.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def simulate(
    trace: tuple[Path, ...],
    place: int | None,
    capacity: str,
    disk: str | None,
    policy: str,
    block_bytes: str | None,
    prefill_tokens_per_s: float | None,
    plot: Path | None,
    html_page: Path | None,
    as_json: bool,
) -> None:
    """Say what a trace of requests would have hit with pools of other sizes.

    TRACE is a folder that `kvtierctl record` has written, or files of it; or has lines of JSON as Mooncake
    publishes them (hash_ids, input_length, timestamp; compressed by gzip or not); or is an archive of numpy
    arrays (parent, leaf, intok, ts). It is replayed through the daemon's own core, with an engine that has no
    cache of its own. No daemon need run. Policies: lru and reuse are those of pool.policy; reuse learns how
    blocks come back. optimum knows the future and shows what is left to win (with a disk, in both tiers
    together). fifo, round-robin, arc and s3fifo are from books, to compare with: the daemon does not have
    them.
    """
    # Imported only here, because no other command needs the core.
    from rich.console import Console

    from kvtierd.ctl import simulation_plot
    from kvtierd.ctl.simulation import blocks_of, capacities, page, policies, results_as_json, simulated
    from kvtierd.simulate.records import read_traces
    from kvtierd.simulate.traces import TraceError

    interrupts.instead("kvtierctl: interrupted")
    if plot is not None and plot.suffix not in simulation_plot.PICTURES:
        message = f"{plot.name} is no {', '.join(simulation_plot.PICTURES)} file"
        raise click.BadParameter(message, param_hint="--plot")
    if (plot or html_page) and not simulation_plot.can_draw():
        raise click.UsageError(simulation_plot.CANNOT_DRAW)
    try:
        requests, notes = read_traces(trace, place)
    except (TraceError, OSError) as error:
        click.echo(f"kvtierctl: no trace: {error}", err=True)
        raise SystemExit(EXIT_USAGE) from None
    for note in notes:
        click.echo(f"kvtierctl: {note}", err=True)
    bytes_of_block = None if block_bytes is None else _parsed("--block-bytes", settings.size, block_bytes)
    if bytes_of_block == 0:
        raise click.BadParameter("a block has at least one byte", param_hint="--block-bytes")
    names = _parsed("--policy", lambda text: policies(text, with_disk=disk is not None), policy)
    below = None
    if disk is not None:
        below = _parsed("--disk", lambda text: blocks_of(text, requests, bytes_of_block), disk)
    sizes = _parsed("--capacity", lambda text: capacities(text, requests, bytes_of_block), capacity)
    results = simulated(requests, names, sizes, Console(stderr=True), disk_blocks=below)
    try:
        if plot is not None:
            simulation_plot.draw(plot, requests, results)
        if html_page is not None:
            simulation_plot.write_page(html_page, requests, results, prefill_tokens_per_s)
    except OSError as error:
        click.echo(f"kvtierctl: cannot write: {error}", err=True)
        raise SystemExit(EXIT_FILE) from None
    if as_json:
        click.echo(json.dumps(results_as_json(requests, notes, results, prefill_tokens_per_s), indent=2))
    else:
        show(page(requests, results, prefill_tokens_per_s))


def _parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """Reads an option's value. Raises BadParameter, which names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None
