"""The formulas of docs/capacity.md, their command line, and the tables of the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.capacity import model, page, simulate
from tools.capacity.__main__ import fleet_of, hosts_of_cell, main, parsed

PAGE = Path(__file__).resolve().parents[3] / "docs" / "capacity.md"
QUESTION = "--hosts 40 --requests 34 --prompt-tokens 12000 --ranks 8 --put 9.5% --read 5.4% --putting 15%"
FORTY = fleet_of(parsed(f"{QUESTION} --store-size 16TiB".split()))
CELLS = dataclasses.replace(FORTY, cell_hosts=10)


def test_requests_for_heads_grow_with_the_square_of_the_hosts() -> None:
    """As long as hosts can follow; each with its share of the requests."""

    def of(hosts: int) -> model.Load:
        return model.load(dataclasses.replace(FORTY, hosts=hosts, requests_per_s=0.85 * hosts))

    two, four, eight = of(2), of(4), of(8)
    assert four.head_reads == pytest.approx(6 * two.head_reads)  # 4 × 3 pairs of hosts, and 2 × 1
    assert eight.head_reads == pytest.approx(28 * two.head_reads)
    assert eight.puts == pytest.approx(4 * two.puts)
    assert eight.range_reads == pytest.approx(4 * two.range_reads)


def test_cells_are_as_large_as_hosts_can_follow() -> None:
    whole, divided = model.load(FORTY), model.load(CELLS)
    assert not whole.keeps_up
    assert divided.keeps_up
    assert divided.puts == pytest.approx(whole.puts)
    assert divided.head_reads == pytest.approx(40 * 9 * divided.puts / 40)
    assert hosts_of_cell(FORTY) == 10
    assert model.load(dataclasses.replace(FORTY, cell_hosts=1)).head_reads == 0


@given(
    st.integers(1, 2_000), st.floats(0.01, 1e4), st.floats(1e-6, 1), st.integers(1, 64), st.floats(0.1, 100)
)
def test_more_packs_are_never_cheaper(
    hosts: int, requests_per_s: float, put: float, ranks: int, look_every_s: float
) -> None:
    fleet = model.Fleet(
        hosts, requests_per_s, 1_000.0, put, 0.1, shards=ranks, look_every_s=look_every_s, keep_days=2.0
    )
    more = dataclasses.replace(fleet, requests_per_s=2 * requests_per_s)
    one, two = model.load(fleet), model.load(more)
    for name in ("puts", "head_reads", "put_bytes", "read_bytes", "kept_bytes", "month_cost"):
        assert getattr(one, name) <= getattr(two, name) * (1 + 1e-9), name
    if two.keeps_up:  # else it learns of less than there is, and keeps that for longer
        assert one.remembered_s >= two.remembered_s
    assert all(value >= 0 for value in dataclasses.astuple(one) if isinstance(value, float))


def test_packs_are_small_at_low_rates_and_full_at_high_ones() -> None:
    block = 1 << 20
    assert model.packs_of_host(1_000.0, 0.001, block) == pytest.approx(0.001, rel=0.01), (
        "one for each request"
    )
    assert model.packs_of_host(1e9, 1.0, block) == pytest.approx(1e9 / model.PACK_BYTES, rel=0.01)
    assert model.packs_of_host(1_000.0, 1e6, block) == pytest.approx(1 / model.LINGER_S, rel=0.01)
    assert model.packs_of_host(0.0, 0.0, block) == 0
    assert model.blocks_per_pack(17 << 20) == 1


def test_memory_is_that_of_the_slots_that_store_size_has_room_for() -> None:
    blocks = 16 * model.TIB / CELLS.block_bytes
    load = model.load(CELLS)
    names = load.packs_per_s_of_cell * model.WINDOW_S * model.NAME_BYTES
    assert load.remembered_bytes_per_host == pytest.approx(blocks * (106 + 8 * 136) + names)


def test_the_command_says_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    main([*QUESTION.split(), "--store-size", "16TiB"])
    text = capsys.readouterr().out
    assert "NOT ALL to others" in text
    assert "Give each 10 hosts a folder" in text
    assert text.strip() in PAGE.read_text(), "the page shows what the command prints"
    main([*QUESTION.split(), "--cell", "10", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["keeps_up"]
    assert found["hints"]
    main([*QUESTION.split(), "--json"])
    assert json.loads(capsys.readouterr().out)["known_after_s"] is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("--put 110%", "10% or 0.1"), ("--hosts 0", "from 1 on"), ("--look-every 0", "above 0")],
)
def test_wrong_values_are_refused_with_what_to_write(
    capsys: pytest.CaptureFixture[str], wrong: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        parsed([*QUESTION.split(), *wrong.split()])
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed([*QUESTION.split(), "--store-size", "16 parsecs"])
    assert "16 parsecs" in capsys.readouterr().err


def test_the_tables_of_the_page_are_what_the_formulas_and_the_simulation_say() -> None:
    text = PAGE.read_text()
    for line in [*page.fleets(), *page.simulated(json.loads(page.ROWS.read_text()))]:
        assert line in text, "python -m tools.capacity.page"


def test_a_trace_is_simulated_beside_what_the_formulas_say(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(trace), "--hosts", "1,3", "--modes", "through", "--bytes-per-token", "1MiB"]
    arguments += ["--pool", "100MiB", "--kept", "100%"]
    simulate.main([*arguments, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["hosts"], row["router"]) for row in rows] == [
        (1, "prefix"),
        (1, "round-robin"),
        (3, "prefix"),
        (3, "round-robin"),
    ]
    for row in rows:
        assert 0 < row["host_hits"] < 1
        assert row["counted"]["puts"] > 0
        assert row["said"]["put_bytes"] > 0
    simulate.main(arguments)
    assert "3 hosts, round-robin, through" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        simulate.main([str(trace), "--modes", "sometimes"])
    assert "sometimes" in capsys.readouterr().err
