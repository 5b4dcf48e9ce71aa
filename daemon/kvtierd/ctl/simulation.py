"""What `kvtierctl simulate` reads from its command line, does, and shows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtierd.config import settings
from kvtierd.ctl.text import count
from kvtierd.simulate.results import POLICIES, WITH_DISK, HitRates, hit_rates
from kvtierd.simulate.traces import Trace

Results = dict[str, dict[str, HitRates]]
"""By policy, and by capacity as it was written."""
TEXT_COLUMNS = 2
"""Of a table of results, the first ones; the others have numbers."""


def policies(text: str, *, with_disk: bool = False) -> tuple[str, ...]:
    """Reads names separated by commas. Raises ValueError."""
    known = WITH_DISK if with_disk else tuple(POLICIES)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = ", ".join(unknown) if unknown else repr(text)
        below = " with a disk below" if with_disk else ""
        raise ValueError(f"there is no policy {wrong}{below}: write some of {', '.join(known)}")
    return names


def capacities(text: str, trace: Trace, block_bytes: int | None) -> dict[str, int]:
    """Reads sizes separated by commas, each in percent of the trace's different blocks (rounded down), as a
    number of blocks, or in bytes. Returns blocks by what was written. Raises ValueError."""
    found: dict[str, int] = {}
    for written in filter(None, (part.strip() for part in text.split(","))):
        found[written] = blocks_of(written, trace, block_bytes)
    if not found:
        raise ValueError("write sizes such as 1%, 20000 (blocks) or 64GiB")
    return found


def blocks_of(written: str, trace: Trace, block_bytes: int | None) -> int:
    """Reads one such size. Raises ValueError."""
    blocks = _blocks(written.strip(), trace, block_bytes)
    if blocks < 1:
        raise ValueError(f"{written} of {count(trace.blocks, 'block')} is less than one block")
    return blocks


def _blocks(written: str, trace: Trace, block_bytes: int | None) -> int:
    try:
        if written.endswith("%"):
            share = float(written[:-1])
            if not (math.isfinite(share) and share > 0):
                raise ValueError
            return math.floor(share / 100 * trace.blocks + 1e-9)
        if written.isdecimal():
            return int(written)
        size = settings.size(written)
    except ValueError:
        raise ValueError(f"{written!r} is no size: write one such as 1%, 20000 (blocks) or 64GiB") from None
    block_bytes = block_bytes or trace.block_bytes
    if block_bytes is None:
        raise ValueError(f"{written} says bytes: say how many a block has (--block-bytes)")
    return size // block_bytes


def simulated(
    trace: Trace,
    names: Sequence[str],
    sizes: dict[str, int],
    progress_on: Console,
    *,
    disk_blocks: int | None = None,
) -> Results:
    """Replays the trace with each policy and size, above a disk if `disk_blocks` is not None, and shows how
    far it is."""
    paths = list(trace.paths())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found: Results = {name: {} for name in names}
    with Progress(*columns, console=progress_on, disable=not progress_on.is_terminal, transient=True) as bars:
        for name in names:
            for written, blocks in sizes.items():
                bar = bars.add_task(f"{name}, {written}", total=trace.requests)
                found[name][written] = hit_rates(
                    trace,
                    paths,
                    name,
                    blocks,
                    lambda done, bar=bar: bars.advance(bar, done),  # type: ignore[misc]
                    disk_blocks=disk_blocks,
                )
                bars.remove_task(bar)
    return found


def results_as_json(
    trace: Trace, notes: Sequence[str], results: Results, prefill_tokens_per_s: float | None
) -> dict[str, Any]:
    """One object: by policy and capacity, and `trace`, which says what was replayed, and what people should
    know of it."""
    about: dict[str, Any] = {"name": trace.name, "requests": trace.requests, "blocks": trace.blocks}
    about |= {"block_tokens": trace.block_tokens, "tokens": int(trace.tokens.sum()), "notes": list(notes)}
    if (live := live_hit_rate(trace)) is not None:
        about["daemon_token_hit_rate"] = live
    found: dict[str, Any] = {"trace": about}
    for name, by_size in results.items():
        found[name] = {written: _without_none(asdict(each)) for written, each in by_size.items()}
        if prefill_tokens_per_s is not None:
            for written, each in by_size.items():
                found[name][written]["prefill_saved_s"] = each.hit_tokens / prefill_tokens_per_s
    return found


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def page(trace: Trace, results: Results, prefill_tokens_per_s: float | None) -> Table:
    """For people: a row for each policy and size."""
    table = Table(box=None, header_style="bold", title_justify="left", title_style="")
    table.title = f"{trace.name}: {about(trace)}"
    for number, name in enumerate(heads(results, prefill_tokens_per_s)):
        table.add_column(name, justify="left" if number < TEXT_COLUMNS else "right")
    for row in rows(results, prefill_tokens_per_s):
        table.add_row(*row)
    return table


def about(trace: Trace) -> str:
    """What a trace has, in a line."""
    hours = float(trace.arrival_s[-1]) / 3_600
    live = live_hit_rate(trace)
    return (
        f"{count(trace.requests, 'request')} in {hours:.1f} h, {int(trace.tokens.sum()):,} tokens, "
        f"{count(trace.blocks, 'different block')} of {trace.block_tokens} tokens"
        + ("" if live is None else f"; the daemon hit {live:.2%} of the tokens")
    )


def live_hit_rate(trace: Trace) -> float | None:
    """What share of the tokens of a recorded trace the daemon has hit; None if it was not recorded."""
    if trace.live is None:
        return None
    return int(trace.live.hits.sum()) * trace.block_tokens / int(trace.tokens.sum())


def heads(results: Results, prefill_tokens_per_s: float | None) -> list[str]:
    """The heads of the columns of `rows`."""
    names = ["policy", "capacity", "blocks", "tokens hit", "blocks hit", "blocks stored"]
    if any(each.disk_blocks is not None for by_size in results.values() for each in by_size.values()):
        names += ["on disk", "written to disk"]
    return names if prefill_tokens_per_s is None else [*names, "prefill saved"]


def rows(results: Results, prefill_tokens_per_s: float | None) -> Iterator[tuple[str, ...]]:
    """A row for each policy and size, as people read it."""
    for name, by_size in results.items():
        for written, each in by_size.items():
            yield tuple(_cells(name, written, each, prefill_tokens_per_s))


def _cells(name: str, written: str, each: HitRates, prefill_tokens_per_s: float | None) -> Iterator[str]:
    yield name
    yield written
    yield f"{each.capacity_blocks:,}"
    yield f"{each.prefix_token_hit_rate:.2%}"
    yield f"{each.block_hit_rate:.2%}"
    yield f"{each.inserts:,}"
    if each.disk_blocks is not None:
        yield f"{each.disk_blocks:,}"
        yield "" if each.disk_writes is None else f"{each.disk_writes:,}"
    if prefill_tokens_per_s is not None:
        yield f"{each.hit_tokens / prefill_tokens_per_s:,.0f} s"
