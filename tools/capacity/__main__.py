"""Says what a fleet of hosts would ask of a shared store, what that costs, and what to set.

    python3 -m tools.capacity --hosts 40 --requests 34 --prompt-tokens 12000 --put 10% --read 5.5%

docs/capacity.md explains every line. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence

from tools.capacity import model
from tools.capacity.arguments import count, fraction, positive, price, size

STORE_SIZE_MAX = 16 * model.TIB
FRACTION_OF_MAX = 0.7
"""A cell should not have more packs than this part of what its hosts can follow."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.capacity",
        description="Says what a fleet of hosts asks of a shared store, and what that costs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    usual, prices = model.Fleet(1, 1.0, 1.0, 0.0, 0.0), model.Prices()
    add = parser.add_argument
    add("--hosts", type=count, required=True, help="daemons")
    add("--requests", type=positive, required=True, help="requests a second, of all hosts together")
    add("--prompt-tokens", type=positive, required=True, help="tokens of a prompt, in the mean")
    add("--put", type=fraction, required=True, help="part of the prompts' tokens that is put into the store")
    add("--read", type=fraction, required=True, help="part of the prompts' tokens that is read from it")
    add("--putting", type=fraction, default=usual.putting_fraction, help="part of requests that put anything")
    add("--bytes-per-token", type=size, default=usual.bytes_per_token, help="of all ranks")
    add("--block-tokens", type=count, default=usual.block_tokens, help="the engine's block size")
    add("--ranks", type=count, default=usual.shards, help="that have a part of each block")
    add("--groups", type=count, default=usual.groups, help="models in use at a time, times their groups")
    add("--cell", type=count, default=None, help="hosts with the same store.url; default: all")
    add("--look-every", type=positive, default=usual.look_every_s, help="store.look_every_s")
    add("--store-size", type=size, default=usual.store_size, help="store.size")
    add("--keep-days", type=positive, default=usual.keep_days, help="after which the bucket removes a pack")
    add("--prefill", type=positive, default=usual.prefill_tokens_per_s, help="tokens/s that a host computes")
    add("--list-s", type=positive, default=usual.list_s, help="seconds of one listing")
    add("--get-s", type=positive, default=usual.get_s, help="seconds of one short read")
    add("--price-1000-puts", type=price, default=1_000 * prices.per_put, help="also of listings")
    add("--price-1000-gets", type=price, default=1_000 * prices.per_get)
    add("--price-gb-month", type=price, default=prices.per_gb_month)
    add("--price-gb-out", type=price, default=prices.per_gb_out, help="for what is read")
    add("--price-host-hour", type=price, default=prices.per_host_hour, help="of a host with its GPUs")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """A command line, or this process's. Ends the process, with a message, if it makes no sense."""
    return _parser().parse_args(arguments)


def fleet_of(arguments: argparse.Namespace) -> model.Fleet:
    return model.Fleet(
        hosts=arguments.hosts,
        requests_per_s=arguments.requests,
        prompt_tokens=arguments.prompt_tokens,
        put_fraction=arguments.put,
        read_fraction=arguments.read,
        putting_fraction=arguments.putting,
        bytes_per_token=arguments.bytes_per_token,
        block_tokens=arguments.block_tokens,
        shards=arguments.ranks,
        groups=arguments.groups,
        cell_hosts=arguments.cell or 0,
        look_every_s=arguments.look_every,
        store_size=arguments.store_size,
        keep_days=arguments.keep_days,
        prefill_tokens_per_s=arguments.prefill,
        list_s=arguments.list_s,
        get_s=arguments.get_s,
        prices=model.Prices(
            per_put=arguments.price_1000_puts / 1_000,
            per_list=arguments.price_1000_puts / 1_000,
            per_get=arguments.price_1000_gets / 1_000,
            per_gb_month=arguments.price_gb_month,
            per_gb_out=arguments.price_gb_out,
            per_host_hour=arguments.price_host_hour,
        ),
    )


def text_of(fleet: model.Fleet, load: model.Load) -> str:
    """What people read."""
    cells = math.ceil(fleet.hosts / fleet.sharing)
    where = f" in {cells} cells of {fleet.sharing}" if cells > 1 else ""
    rows = [
        f"{fleet.hosts:,} hosts{where}, {fleet.requests_per_s:,g} requests/s of {fleet.prompt_tokens:,.0f} "
        f"tokens, {fleet.bytes_per_token / model.KIB:,.0f} KiB a token",
        "",
        f"requests    puts {_rate(load.puts)}, listings {_rate(load.lists)}, heads {_rate(load.head_reads)}, "
        f"ranges {_rate(load.range_reads + load.heads_read_again)}",
        f"bytes       {_bytes(load.put_bytes)}/s put, {_bytes(load.read_bytes)}/s read, "
        f"{_bytes(load.head_bytes)}/s of heads; a host reads {_bytes(load.host_read_bytes)}/s",
        f"kept        {_bytes(load.kept_bytes)} in {load.kept_packs:,.0f} packs of {_bytes(load.pack_bytes)}",
        f"known       {_known(load)}",
        f"remembered  {_time(load.remembered_s)} (store.size), with "
        f"{_bytes(load.remembered_bytes_per_host)} of memory on each host",
        f"a start     reads {load.start_reads:,.0f} heads"
        + (f" in {_time(load.start_s)}" if load.keeps_up else ", and never all"),
        f"a month     {load.month_requests_cost:,.0f} for requests, {load.month_kept_cost:,.0f} for what is "
        f"kept, {load.month_traffic_cost:,.0f} for traffic: {load.month_cost:,.0f}",
        f"saved       {load.hosts_saved:,.1f} hosts' computing: {load.month_saved:,.0f} a month",
    ]
    said = hints(fleet, load)
    return "\n".join([*rows, *([""] if said else []), *(f"- {hint}" for hint in said)])


def hints(fleet: model.Fleet, load: model.Load) -> list[str]:
    """What should be set otherwise."""
    said = []
    share = load.packs_per_s_of_cell * (1 - 1 / fleet.sharing) / load.packs_per_s_max
    if share > FRACTION_OF_MAX:
        trouble = "cannot follow" if share >= 1 else "hardly follow"
        most = hosts_of_cell(fleet)
        bytes_per_s = FRACTION_OF_MAX / share * load.put_bytes / fleet.hosts
        said.append(
            f"Hosts {trouble} {load.packs_per_s_of_cell:,.0f} packs a second. Give each {most} hosts a "
            f"folder of their own in store.url (--cell {most}), or set store.write_bytes_per_s = "
            f'"{int(bytes_per_s / model.MIB)}MiB".'
        )
    if load.remembered_s < min(3_600.0, fleet.keep_days * model.DAY_S):
        larger = "use smaller cells" if fleet.store_size >= STORE_SIZE_MAX else "it may be up to 16TiB"
        said.append(
            f"What was put more than {_time(load.remembered_s)} ago is a miss, because store.size is "
            f"{_size(fleet.store_size)}: {larger}."
        )
    if load.keeps_up and load.start_s > 600:
        said.append(
            f"A host that starts reads for {_time(load.start_s)}, the oldest first. Let the bucket remove "
            "packs sooner, or use smaller cells."
        )
    said.append(
        f"Loading is as fast as computing if a host reads {_bytes(load.host_needs_bytes)}/s. If the store "
        "gives less, store.recompute_if_faster makes what is there a miss."
    )
    if load.month_saved < load.month_cost:
        said.append("It costs more than the computing that it saves.")
    return said


def hosts_of_cell(fleet: model.Fleet) -> int:
    """How many hosts a cell should have, so that its hosts can well follow each other, and all cells have
    about the same number."""
    load = model.load(fleet)
    of_host = load.packs_per_s_of_cell / fleet.sharing
    if not of_host:
        return fleet.hosts
    most = 1 + int(FRACTION_OF_MAX * load.packs_per_s_max / of_host)
    return math.ceil(fleet.hosts / math.ceil(fleet.hosts / most))


def _known(load: model.Load) -> str:
    rate = (
        f"{load.packs_per_s_of_cell:,.1f} packs/s in a cell; hosts can follow {load.packs_per_s_max:,.0f}/s"
    )
    if load.keeps_up:
        return f"to others after {_time(load.known_after_s)} ({rate})"
    return f"NOT ALL to others ({rate})"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.2g}/s"


def _bytes(value: float) -> str:
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def _size(value: int) -> str:
    for unit, factor in (("TiB", model.TIB), ("GiB", model.GIB), ("MiB", model.MIB)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value} bytes"


def _time(seconds: float) -> str:
    for unit, factor in (("days", model.DAY_S), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * factor:
            return (
                f"{seconds / factor:.2g} {unit}"
                if seconds < 100 * factor
                else f"{seconds / factor:,.0f} {unit}"
            )
    return f"{seconds:.2g} s"


def main(arguments: Sequence[str] | None = None) -> None:
    found = parsed(arguments)
    fleet = fleet_of(found)
    load = model.load(fleet)
    if found.json:
        every = dataclasses.asdict(load) | {"month_cost": load.month_cost, "keeps_up": load.keeps_up}
        # JSON has no infinity: what hosts never come to know is null.
        finite = {name: value if math.isfinite(value) else None for name, value in every.items()}
        print(json.dumps(finite | {"hints": hints(fleet, load)}, indent=2))
    else:
        print(text_of(fleet, load))


if __name__ == "__main__":
    main()
