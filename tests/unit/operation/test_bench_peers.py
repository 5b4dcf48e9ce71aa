"""What could break silently in the benchmark of peers: that wrong bytes show, that figures are compared the
right way round, and that the report tells all of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.peers import content, replay, report
from tests.benchmarks.peers.driver import BLOCK_TOKENS, MODELS, SHAPES, SMALL, Peer, PeerEngine, Prompt
from tests.benchmarks.peers.engine_child import EngineCommands, make_engine, scattered
from tests.benchmarks.peers.faults import flip_bytes
from tests.benchmarks.peers.memcpy_peer import MEMCPY
from tests.benchmarks.peers.reasons import NOT_KNOWN, reasons_of
from tests.benchmarks.peers.registry import COPY_PEERS, FAULT_PEERS, LOOKUP_PEERS, PEERS, SERVERS
from tests.benchmarks.peers.rows import compared
from tests.vllm.engine import Generated

PLANES, BLOCKS, FRAGMENT_BYTES = 3, 8, 64
PROMPT = Prompt(7, 5)
HOLDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as pool, mmap.mmap(pool.fileno(), 0) as mapping:
    print("mapped", flush=True)
    sys.stdin.read()
"""
TIMED = ("register", "store", "lookup", "give_back", "load")


@pytest.fixture
def memory() -> list[np.ndarray]:
    """An engine's cache with a prompt in it."""
    planes = list(np.zeros((PLANES, BLOCKS, FRAGMENT_BYTES), np.uint8))
    content.fill(planes, PROMPT, [6, 1, 4, 2, 3])
    return planes


def test_what_was_filled_in_is_right_and_nothing_else_is(memory: list[np.ndarray]) -> None:
    ids = [6, 1, 4, 2, 3]
    assert content.wrong_blocks(memory, PROMPT, ids) == 0
    assert content.wrong_blocks(memory, Prompt(8, 5), ids) == 5  # of another prompt
    assert content.wrong_blocks(memory, PROMPT, ids[::-1]) == 4  # in the wrong order; one stays in its place
    assert content.wrong_blocks(memory, Prompt(7, 3), ids[:3]) == 0  # a prompt's beginning is its own


def test_a_changed_byte_shows_wherever_it_is(memory: list[np.ndarray]) -> None:
    for plane in range(PLANES):
        for byte in (0, 9, FRAGMENT_BYTES - 1):
            memory[plane][4, byte] ^= 1
            assert content.wrong_blocks(memory, PROMPT, [6, 1, 4, 2, 3]) == 1
            memory[plane][4, byte] ^= 1


def test_fragments_of_the_wrong_plane_and_wiped_blocks_show(memory: list[np.ndarray]) -> None:
    memory[0][6], memory[1][6] = memory[1][6].copy(), memory[0][6].copy()
    assert content.wrong_blocks(memory, PROMPT, [6, 1, 4, 2, 3]) == 1
    content.wipe(memory, [6, 1])
    assert content.wrong_blocks(memory, PROMPT, [6, 1, 4, 2, 3]) == 2


def test_no_two_blocks_begin_alike() -> None:
    firsts = np.concatenate([content.starts(Prompt(seed, 10_000)) for seed in range(20)])
    assert len(np.unique(firsts)) == len(firsts)


def test_an_engine_loads_what_it_stored_and_a_wrong_byte_is_counted() -> None:
    commands = EngineCommands(MEMCPY.engine, {})
    commands.do_register({}, vars(MODELS[3]) | {"layers": 2}, 16, "test")
    commands.do_store(seed=3, blocks=16)
    assert commands.do_load(seed=3, blocks=16)["wrong"] == 0
    commands._engine._store[12_345] ^= 1  # type: ignore[attr-defined]  # the peer's copy
    assert commands.do_load(seed=3, blocks=16)["wrong"] == 1
    commands.do_close()


def test_block_0_is_never_used() -> None:
    assert sorted(scattered(64, 64)) == list(range(1, 65))


def test_a_byte_is_flipped_in_the_memory_of_a_process_and_nowhere_else(tmp_path: Path) -> None:
    pool, pattern = tmp_path / "pool", content.first_bytes(PROMPT, 2, 64)
    before = bytearray(8 << 20)
    before[5_000_000:5_000_064] = pattern
    pool.write_bytes(before)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, pool], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mapped\n"
        other = content.first_bytes(Prompt(99, 1), 0, 64)
        assert flip_bytes([holder.pid], [pattern, other]) == 1
        assert flip_bytes([holder.pid], [pattern]) == 0, "it is another pattern now"
        holder.stdin.close()
    now = np.frombuffer(pool.read_bytes(), np.uint8)
    changed = np.flatnonzero(now != np.frombuffer(before, np.uint8)).tolist()
    assert changed == [5_000_040]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_whole_driver_that_says_what_it_times(peer: Peer) -> None:
    engine = make_engine(peer.engine, peer.options)  # not possible while a method is missing
    for name in TIMED:
        said = getattr(type(engine), name).__doc__
        assert said, f"{peer.engine}.{name} has to say which of the peer's calls it times"
        assert said != getattr(PeerEngine, name).__doc__
    assert not peer.server or peer.server in SERVERS


def test_parts_name_peers_that_there_are() -> None:
    names = {peer.name for peer in PEERS}
    assert {*LOOKUP_PEERS, *COPY_PEERS, *FAULT_PEERS} <= names
    assert sum(peer.ours for peer in PEERS) == 1


def test_a_contiguous_shape_has_the_same_bytes() -> None:
    assert [shape.block_bytes for shape in SHAPES[::2]] == [shape.block_bytes for shape in SHAPES[1::2]]
    assert MODELS[1].block_bytes == 32 * 2 * 8 * 128 * 2 * BLOCK_TOKENS  # Llama 3 8B
    assert SMALL.block_bytes == 4096


def results_of(**more: Any) -> dict[str, Any]:
    """Of a run in which kvtier wins, loses and draws, as `results.json` has them."""
    names = ("kvtier", "lmcache_zmq", "memcpy")
    sweep = [
        {"peer": name, "entries": 100, "hashes": 64, "p50_us": p50, "p99_us": p50 * 3, "samples": 9}
        for name, p50 in zip(names[:2], (300.0, 200.0), strict=True)
    ]
    copies = [
        {
            "peer": name,
            "shape": "1b",
            "title": "1B",
            "what": what,
            "bytes": 1 << 28,
            "gb_per_s": rate,
            "samples_s": [0.1],
            "spread": 0.2,
            "noisy": name == "lmcache_zmq" and what == "load",
        }
        for what in ("store", "load")
        for name, rate in zip(names, (5.0, 1.5, 9.0), strict=True)
    ]
    flips = [{"peer": name, "when": "at once", "flipped": 8, "served": 0, "refused": 8} for name in names[:2]]
    kills = [
        {
            "peer": name,
            "shared_bytes": 1 << 27,
            "memory_s": memory_s,
            "holds_s": memory_s,
            "held_bytes": 0,
            "seconds": memory_s,
            "gave_up_s": 20.0,
        }
        for name, memory_s in zip(names[:2], (0.04, None), strict=True)
    ]
    found: dict[str, Any] = {
        "machine": {
            "processor": "a <fast> one",
            "cores": 2,
            "memory_gib": 24,
            "kernel": "6",
            "system": "Linux",
        },
        "versions": {"kvtier": "0.1.0"},
        "peers": [{"name": name, "title": name.upper(), "how": "as | usual"} for name in names],
        "absent": [{"title": "PegaFlow", "why": "no GPU"}],
        "failed": [{"part": "copies", "peer": "mooncake", "why": "it died\nof this"}],
        "quick": True,
        "began": "today",
        "seconds": 90.0,
        "busy": {"copies": {"load_1m": 1.0, "steal_part": 0.01, "idle_part": 0.5, "seconds": 60.0}},
        "lookups": {"sweep": sweep, "callers": [], "filled": {}},
        "copies": copies,
        "faults": {"engine_kill": kills, "daemon_kill": [], "flips": flips, "cancel": []},
    }
    found["machine"]["python"] = "3.11"
    found |= more
    found["rows"] = compared(found)
    return found


def test_figures_are_compared_the_right_way_round() -> None:
    rows = {row["name"]: row for row in compared(results_of())}
    assert rows["lookup_64_p50_us"]["verdict"] == "lost"
    assert rows["store_1b_gb_per_s"]["verdict"] == "won"
    assert rows["store_1b_gb_per_s"]["best_peer"] == "lmcache_zmq", "a memcpy is a limit, and no peer"
    assert rows["load_1b_gb_per_s"]["noisy"]
    assert rows["corrupt_served_at_once"]["verdict"] == "equal"
    assert rows["engine_kill_reclaim_s"]["verdict"] == "alone", "no peer gave the memory back"


def test_a_figure_that_kvtier_does_not_have_is_lost() -> None:
    results = results_of()
    results["faults"]["engine_kill"][0]["seconds"] = None
    results["faults"]["engine_kill"][1]["seconds"] = 3.0
    rows = {row["name"]: row for row in compared(results)}
    assert rows["engine_kill_reclaim_s"]["verdict"] == "lost"


def test_the_report_tells_what_was_lost_and_who_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_draw", lambda raw, folder: [])  # matplotlib is fetched for it
    page = report.write(results_of(), tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    assert (
        "lookup of 64 hashes, p50, given back | 300 µs | 200 µs | LMCACHE_ZMQ | 1.50 | **lost** |" in markdown
    )
    assert "| PegaFlow | no GPU |" in markdown
    assert "| copies | mooncake | it died |" in markdown
    assert "not within 20 s" in markdown
    assert "as \\| usual" in markdown
    assert "matplotlib was not to be had" in markdown
    text = page.read_text()
    assert '<tr class="lost">' in text
    assert "a &lt;fast&gt; one" in text
    assert json.loads((tmp_path / "results.json").read_text())["rows"]


def test_plots_are_drawn_by_a_program_that_needs_nothing_of_ours() -> None:
    plots = importlib.import_module("tests.benchmarks.peers.plots")
    source = Path(plots.__file__ or "").read_text()
    assert "import numpy" not in source
    assert "from tests" not in source
    assert {peer.name for peer in PEERS} <= set(plots.COLORS)


class EngineThatCounts:
    """Answers at once; the tokens that it has not computed are those that it saw before."""

    def __init__(self) -> None:
        self.served: list[list[int]] = []

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        seen = len(prompts[0]) if prompts[0] in self.served else 0
        self.served += prompts
        return [Generated(prompts[0][:max_tokens], [], seen, 0.01, 0.02, "length")]


def test_a_replay_serves_everybody_the_same_and_what_it_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: Any = {mode: EngineThatCounts() for mode in ("none", "prefix", "kvtier", "lmcache")}
    prompts = [[number, 1, 2, 3] for number in range(20)]
    found = replay._trace(engines, "chat", prompts, lambda text: None, 0.0, 3)
    assert found["prompts"] == replay.AT_ONCE, "time was up: no more than the first few"
    assert {len(one.served) for one in engines.values()} == {replay.AT_ONCE}
    assert len({str(sorted(one.served)) for one in engines.values()}) == 1
    found = replay._trace(engines, "chat", prompts, lambda text: None, float("inf"), 3)
    assert found["prompts"] == 20
    assert found["runs"] == replay.REPETITIONS_MIN
    assert not found["noisy"]
    assert [row["mode"] for row in found["rows"]] == list(engines)
    monkeypatch.setattr(replay, "RESTORED_PROMPTS", {50: 3})
    restored = replay._restored(engines, 50, lambda text: None, float("inf"))
    rows = {row["mode"]: row for row in restored["rows"]}
    assert rows["none"]["restored_ms"] is None
    assert rows["kvtier"]["cached_tokens"] == 50
    assert rows["kvtier"]["other_output"] == 0
    told = results_of(replay={"restored": [restored], "traces": [found | {"source": "made up"}]})
    assert {"restored_50_ttft_ms", "trace_chat_ttft_ms"} <= {row["name"] for row in told["rows"]}
    assert "50 tokens | no cache" in report.markdown(report.sections_of(told, []))


def test_what_is_lost_is_told_with_its_reason() -> None:
    names = (
        "lookup_1_p50_us",
        "lookup_64_p99_us",
        "lookup_8192_p50_us",
        "store_70b_whole_gb_per_s",
        "new_ms",
    )
    rows = [{"name": name, "title": name, "verdict": "lost"} for name in names]
    rows.append({"name": "lookup_1_p99_us", "title": "won", "verdict": "won"})
    found = reasons_of(rows)
    assert [titles for titles, _, _ in found] == [
        "lookup_1_p50_us; lookup_64_p99_us",
        "lookup_8192_p50_us; new_ms",
        "store_70b_whole_gb_per_s",
    ]
    assert [why == NOT_KNOWN for _, why, _ in found] == [False, True, False]
