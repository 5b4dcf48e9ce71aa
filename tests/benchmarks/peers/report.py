"""The report of a run, made of results.json alone: Markdown, and an HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.lmcache_peer import UV
from tests.benchmarks.peers.reasons import reasons_of

MATPLOTLIB = "matplotlib>=3.10,<4"
DRAW_DEADLINE_S = 180
VERDICTS = {"won": "won", "lost": "**lost**", "equal": "equal", "alone": "nothing to compare with"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2em auto;
       padding: 0 1em; color: #1f2933 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
th, td { border: 1px solid #d5dbe1; padding: 3px 9px; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
th { background: #f3f5f7 } img { max-width: 100% }
tr.lost td { background: #fdeaea } tr.won td { background: #eaf7ee }
"""

Table = tuple[Sequence[str], list[Sequence[str]]]
"""Head, and rows of cells in Markdown."""


def write(results: dict[str, Any], folder: Path) -> Path:
    """Writes results.json, the plots, report.md and report.html into `folder`. Returns the HTML page's path.
    Where matplotlib cannot be had, the pages say so instead of showing plots."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "results.json"
    raw.write_text(json.dumps(results, indent=1, allow_nan=False))
    for old in folder.glob("*.png"):
        old.unlink()
    plots = _draw(raw, folder)
    sections = sections_of(results, plots)
    (folder / "report.md").write_text(markdown(sections))
    page = folder / "report.html"
    page.write_text(as_html(sections, folder))
    return page


def sections_of(results: dict[str, Any], plots: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Titles, and what is below each: paragraphs (str), tables, and plots (Path of a file in the folder)."""
    titles = {peer["name"]: peer["title"] for peer in results["peers"]} | {
        "lmcache": "LMCache's server",
        "none": "no cache",
        "prefix": "vLLM's own cache",
    }
    about = _about(results) + ([] if plots else ["There are no plots: matplotlib was not to be had."])
    sections: list[tuple[str, list[Any]]] = [
        ("kvtier and its peers", about),
        ("What was compared, and who won", [*_verdicts(results, titles)]),
        ("Who took part, and how", _peers(results)),
    ]

    def add(title: str, plot: str, *below: Any) -> None:
        shown = [Path(plot)] if plot in plots else []
        sections.append((title, [*shown, *below]))

    if lookups := results.get("lookups"):
        add("Lookups", "lookups.png", _LOOKUPS, _sweep(lookups, titles), _callers(lookups, titles))
    if copies := results.get("copies"):
        add("Stores and loads", "copies.png", _COPIES, _copies(copies, titles))
    if small := results.get("small"):
        add("Small stores and loads", "", _SMALL, _small(small, titles))
    if mixed := results.get("mixed"):
        add("Mixed load", "mixed.png", _MIXED, _mixed(mixed, titles))
    if replay := results.get("replay"):
        add("Time to the first token", "first_token.png", _REPLAY, _restored(replay), *_traces(replay))
    if faults := results.get("faults"):
        add("Faults", "", _FAULTS, *_faults(faults, titles))
    sections.append(("How busy the machine was", [_BUSY, _busy(results)]))
    return sections


_LOOKUPS = (
    "Every lookup hits, and what it holds is given back by a call that waits for no answer, as each peer's"
    " own connector for vLLM does; both calls are timed. Names (hashes, token ids, keys) are prepared before."
    " LMCache is sent token ids and hashes them itself; with its usual chunks of 256 tokens it looks up as"
    " many tokens with a sixteenth of the objects. Mooncake has no call that gives back: what it holds"
    " expires."
)
_COPIES = (
    "Medians. Every block has content of its own, and every byte is compared after each load. Blocks lie"
    " scattered in the engine's memory; “contiguous” means that a block is one piece. A store ends when its"
    " blocks can be found. A figure with a * is noisy: the quartiles of its repetitions differ by more than"
    " 10 % of their median."
)
_SMALL = "8 MiB of the shape 1B at a time, one after another."
_MIXED = (
    "For some seconds, one engine stores new content, one loads, and one looks up 16 hashes, each without a"
    " pause and in a process of its own. A rate counts the time inside of that engine's calls."
)
_REPLAY = (
    "One vLLM on CPUs for each cache, all in the same run, each prompt served by all of them in turn. The"
    " engine's own cache holds 3,200 tokens. kvtier and LMCache have as much memory, and both keep blocks of"
    " 32 tokens. “Other output” counts answers that differ from those to the same prompt when it was"
    " computed: the model's weights are random, so rounding decides, which depends on how many tokens are"
    " computed at once. The bytes that are loaded are compared elsewhere."
)
_FAULTS = (
    "Engine kill: what the server's processes still map of the dead engine's memory, and what still holds the"
    " blocks that the engine had looked up. Server kill: SIGKILL, then a start as a supervisor would do it."
    " Flipped bytes: one byte of each of eight stored prompts is changed in the server's memory."
)
_BUSY = (
    "Steal is time that the host gave to other machines. Where the load is above the number of cores, threads"
    " waited for a core."
)


def _about(results: dict[str, Any]) -> list[Any]:
    machine, versions = results["machine"], results["versions"]
    return [
        f"Measured {results['began']} in {results['seconds'] / 60:.0f} minutes"
        f"{' (quick)' if results['quick'] else ''}, on {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_gib']} GiB, {machine['system']} {machine['kernel']}, Python {machine['python']}."
        " No GPU: everything here is copied by processors.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "Absolute figures of a shared machine say little. All figures of one table are of one run, with the"
        " peers in turns; compare those.",
    ]


def _verdicts(results: dict[str, Any], titles: dict[str, str]) -> list[Any]:
    rows = results["rows"]
    head = ("figure", "kvtier", "best peer", "which", "kvtier ÷ peer", "kvtier")
    cells = []
    for row in rows:
        ours, best, unit = row["ours"], row["best"], row["unit"]
        ratio = f"{ours / best:.2f}" if ours is not None and best else ""
        verdict = VERDICTS[row["verdict"]] + (" (noisy)" if row["noisy"] else "")
        cells.append(
            (
                row["title"],
                _number(ours, unit),
                _number(best, unit),
                titles.get(row["best_peer"], ""),
                ratio,
                verdict,
            )
        )
    counts = {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}
    said = (
        f"Of {len(rows)} figures kvtier won {counts['won']}, lost {counts['lost']}, and {counts['equal']} are"
        " equal."
    )
    lost = reasons_of(rows)
    why = ["What was lost, why, and what winning it would take:", (("lost", "why", "would take"), lost)]
    return [said, (head, cells), *(why if lost else [])]


def _peers(results: dict[str, Any]) -> list[Any]:
    below: list[Any] = [
        (("peer", "how it is configured"), [(peer["title"], peer["how"]) for peer in results["peers"]])
    ]
    if results["absent"]:
        below += [
            "Not measured:",
            (("peer", "why not"), [(absent["title"], absent["why"]) for absent in results["absent"]]),
        ]
    if results["failed"]:
        below += [
            "Left out of a part, because something failed:",
            (
                ("part", "peer", "what failed"),
                [(each["part"], each["peer"], each["why"].splitlines()[0]) for each in results["failed"]],
            ),
        ]
    return below


def _sweep(lookups: dict[str, Any], titles: dict[str, str]) -> Table:
    rows = lookups["sweep"] + lookups.get("large", [])
    hashes = sorted({row["hashes"] for row in rows})
    head = ["entries", "peer", *(f"{n:,} hashes, p50 / p99 µs" for n in hashes)]
    cells: list[Sequence[str]] = []
    for entries, peer in dict.fromkeys((row["entries"], row["peer"]) for row in rows):
        mine = {row["hashes"]: row for row in rows if row["entries"] == entries and row["peer"] == peer}
        told = [f"{mine[n]['p50_us']:,.0f} / {mine[n]['p99_us']:,.0f}" if n in mine else "" for n in hashes]
        cells.append((f"{entries:,}", titles[peer], *told))
    return head, cells


def _callers(lookups: dict[str, Any], titles: dict[str, str]) -> Table:
    cells: list[Sequence[str]] = [
        (
            str(row["callers"]),
            titles[row["peer"]],
            f"{row['lookups_per_s']:,.0f}",
            f"{row['p50_us'] / 1e3:,.2f}",
            f"{row['p99_us'] / 1e3:,.2f}",
        )
        for row in sorted(
            lookups["callers"], key=lambda row: (row["callers"], list(titles).index(row["peer"]))
        )
    ]
    return ("callers", "peer", "lookups of 64 hashes per second", "p50 ms", "p99 ms"), cells


def _copies(copies: list[dict[str, Any]], titles: dict[str, str]) -> Table:
    peers = [name for name in titles if any(row["peer"] == name for row in copies)]
    head = ["shape", "", *(titles[peer] for peer in peers)]
    cells: list[Sequence[str]] = []
    for title, what in dict.fromkeys((row["title"], row["what"]) for row in copies):
        mine = {row["peer"]: row for row in copies if row["title"] == title and row["what"] == what}
        told = [f"{mine[p]['gb_per_s']:.2f}{' *' * mine[p]['noisy']}" if p in mine else "" for p in peers]
        cells.append((title, what, *told))
    return head, cells


def _small(small: list[dict[str, Any]], titles: dict[str, str]) -> Table:
    cells: list[Sequence[str]] = [
        (
            titles[row["peer"]],
            row["what"],
            f"{row['p50_ms']:.2f}",
            f"{row['p99_ms']:.2f}",
            f"{row['bytes'] / row['p50_ms'] / 1e6:.2f}",
        )
        for row in small
    ]
    return ("peer", "", "p50 ms", "p99 ms", "GB/s at p50"), cells


def _mixed(mixed: list[dict[str, Any]], titles: dict[str, str]) -> Table:
    head = (
        "peer",
        "store GB/s",
        "store p99 ms",
        "load GB/s",
        "load p99 ms",
        "lookup p50 µs",
        "lookup p99 µs",
    )
    return head, [
        (
            titles[row["peer"]],
            f"{row['store_gb_per_s']:.2f}",
            f"{row['store_p99_ms']:.1f}",
            f"{row['load_gb_per_s']:.2f}",
            f"{row['load_p99_ms']:.1f}",
            f"{row['lookup_p50_us']:,.0f}",
            f"{row['lookup_p99_us']:,.0f}",
        )
        for row in mixed
    ]


_MODES = {"none": "no cache", "prefix": "vLLM's own cache", "kvtier": "kvtier", "lmcache": "LMCache's server"}


def _restored(replay: dict[str, Any]) -> Table:
    head = ("prompt", "cache", "computed ms", "restored ms", "p90 ms", "tokens not computed", "other output")
    return head, [
        (
            f"{restored['tokens']:,} tokens",
            _MODES[row["mode"]],
            f"{row['computed_ms']:.0f}",
            *(
                ("", "", "", "")
                if row["restored_ms"] is None
                else (
                    f"{row['restored_ms']:.1f}{' *' * row['noisy']}",
                    f"{row['restored_p90_ms']:.1f}",
                    f"{row['cached_tokens']:,.0f}",
                    f"{row['other_output']} of {row['samples']}",
                )
            ),
        )
        for restored in replay["restored"]
        for row in restored["rows"]
    ]


def _traces(replay: dict[str, Any]) -> list[Any]:
    sources = "; ".join(
        f"“{trace['workload']}”: {trace['prompts']} prompts, {trace['tokens']:,} tokens ({trace['source']}),"
        f" {trace['runs']} runs{', which differ by more than 10 %: noisy' if trace['noisy'] else ''}"
        for trace in replay["traces"]
    )
    head = ("trace", "cache", "mean ms", "of each run", "p50 ms", "p90 ms", "tokens/s", "hit rate")
    cells = [
        (
            trace["workload"],
            _MODES[row["mode"]],
            f"{row['mean_ttft_ms']:.1f}",
            ", ".join(f"{mean:.0f}" for mean in row["means_ms"]),
            f"{row['p50_ttft_ms']:.1f}",
            f"{row['p90_ttft_ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['hit_rate']:.0%}",
        )
        for trace in replay["traces"]
        for row in trace["rows"]
    ]
    return [sources + ".", (head, cells)]


def _faults(faults: dict[str, Any], titles: dict[str, str]) -> list[Any]:
    def late(row: dict[str, Any], key: str) -> str:
        return f"not within {row['gave_up_s']:.0f} s" if row[key] is None else f"{row[key] * 1e3:,.0f} ms"

    kills = [
        (titles[r["peer"]], f"{r['shared_bytes'] >> 20} MiB", late(r, "memory_s"), late(r, "holds_s"))
        for r in faults["engine_kill"]
    ]
    daemon = [
        (
            titles[row["peer"]],
            f"{row['serving_s']:.2f}",
            f"{row['warm_s']:.2f}" if row["warm_s"] is not None else "never",
            f"{row['kept_share']:.0%}",
            str(row["wrong_blocks"]),
        )
        for row in faults["daemon_kill"]
    ]
    flips = [
        (titles[row["peer"]], row["when"], f"{row['served']} of {row['flipped']}", str(row["refused"]))
        for row in faults["flips"]
    ]
    cancels = [(titles[r["peer"]], f"{r['seconds'] * 1e3:.2f}", r["how"]) for r in faults["cancel"]]
    return [
        (("engine kill", "shared with the server", "memory back after", "holds ended after"), kills),
        (("server kill", "serves after s", "finds blocks after s", "blocks kept", "wrong blocks"), daemon),
        (("flipped byte", "loaded", "served wrong", "refused, or gone"), flips),
        (("a load of 128 MiB taken back", "ms until the blocks are the engine's", "how"), cancels),
    ]


def _busy(results: dict[str, Any]) -> Table:
    head = ("part", "minutes", "load (1 min)", "steal", "idle")
    return head, [
        (
            part,
            f"{busy['seconds'] / 60:.1f}",
            f"{busy['load_1m']:.1f}",
            f"{busy['steal_part']:.1%}",
            f"{busy['idle_part']:.0%}",
        )
        for part, busy in results["busy"].items()
    ]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "never"
    digits = 0 if unit == "µs" else 1 if unit == "ms" else 2
    return f"{value:,.{digits}f} {unit}".strip()


def markdown(sections: list[tuple[str, list[Any]]]) -> str:
    """The whole page."""
    lines = []
    for number, (title, below) in enumerate(sections):
        lines += [f"{'#' if not number else '##'} {title}", ""]
        for part in below:
            if isinstance(part, Path):
                lines += [f"![{title}]({part})", ""]
            elif isinstance(part, str):
                lines += [part, ""]
            else:
                head, rows = part
                lines += ["| " + " | ".join(head) + " |", "| " + " | ".join("--" for _ in head) + " |"]
                lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
                lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_html(sections: list[tuple[str, list[Any]]], folder: Path) -> str:
    """The whole page, with the plots inside of it."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvtier and its peers</title><style>{STYLE}"
    ]
    parts.append("</style>")
    for number, (title, below) in enumerate(sections):
        level = 2 if number else 1
        parts.append(f"<h{level}>{html.escape(title)}</h{level}>")
        for part in below:
            if isinstance(part, Path):
                data = base64.b64encode((folder / part).read_bytes()).decode()
                parts.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">')
            elif isinstance(part, str):
                parts.append(f"<p>{html.escape(part)}</p>")
            else:
                parts.append(_html_table(part))
    return "\n".join(parts)


def _html_table(table: Table) -> str:
    head, rows = table
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        verdict = row[-1].strip("* ").split(" ")[0].strip("*")
        kind = f' class="{verdict}"' if verdict in ("won", "lost") else ""
        cells = "".join(f"<td{_kind(cell)}>{html.escape(cell.replace('**', ''))}</td>" for cell in row)
        lines.append(f"<tr{kind}>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _kind(cell: str) -> str:
    return ' class="number"' if cell[:1].isdigit() else ""


def _draw(raw: Path, folder: Path) -> list[str]:
    script = Path(__file__).with_name("plots.py")
    command = [str(UV), "run", "--quiet", "--no-project", f"--python={sys.executable}"]
    command += [f"--with={MATPLOTLIB}", "python", str(script), str(raw), str(folder)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DRAW_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"no plots: {error}", file=sys.stderr)
        return []
    if done.returncode:
        print(f"no plots: {done.stderr.strip()[-500:]}", file=sys.stderr)
        return []
    drawn: list[str] = json.loads(done.stdout.splitlines()[-1])
    return drawn
