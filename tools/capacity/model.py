"""What a fleet asks of a shared store, by formulas that docs/capacity.md explains one by one.

The constants are those of the code, and `tests/integration/stores/test_calls.py` counts what daemons really
send. Prices and times are inputs. Standard library only, so that this runs anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
GB: Final = 1e9
MONTH_S: Final = 30 * 86_400.0
DAY_S: Final = 86_400.0

PACK_BYTES: Final = 16 * MIB
"""No pack has more bytes of blocks, unless a single block has."""
LINGER_S: Final = 0.25
"""So long what is to be put waits for more."""
WINDOW_S: Final = 600.0
"""Each look lists the names of so long again."""
LISTED_AT_ONCE: Final = 1_000
TOLD_AT_ONCE: Final = 64
"""New packs after which a listing begins anew."""
HEADS_AT_ONCE: Final = 16
HEAD_READ_BYTES: Final = 64 * KIB
HEADS_KEPT: Final = 256
RANGES_PER_READ: Final = 1
"""Blocks that lie side by side in a pack are read as one range."""
HEAD_BYTES: Final = 96
RECORD_BYTES: Final = 72
ALIGNMENT: Final = 4 * KIB
SLOT_RECORD_BYTES: Final = 128
"""For each shard that is remembered: its record,"""
LOCATION_BYTES: Final = 8
"""and where it is."""
TABLE_BYTES: Final = 106
"""For each block that is remembered."""
NAME_BYTES: Final = 200
"""For each name of the last ten minutes, about, in the worker."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a store takes, in one currency. The defaults have the size of an American list price for objects
    that are read often; they are an example."""

    per_put: float = 0.005 / 1_000
    per_list: float = 0.005 / 1_000
    per_get: float = 0.0004 / 1_000
    per_gb_month: float = 0.023
    per_gb_in: float = 0.0
    per_gb_out: float = 0.0
    """Nothing within one region."""
    per_host_hour: float = 20.0
    """What a host with its GPUs costs, to say what saved computing is worth."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts that serve one model, and how their requests are. Rates are those of the whole fleet."""

    hosts: int
    requests_per_s: float
    prompt_tokens: float
    put_fraction: float
    """The part of all prompts' tokens that is put into the store."""
    read_fraction: float
    """The part that is read from the store, and else would be computed."""
    putting_fraction: float = 0.5
    """The part of requests that put anything."""
    bytes_per_token: int = 320 * KIB
    block_tokens: int = 16
    shards: int = 1
    """Ranks that have a part of each block."""
    groups: int = 1
    """Kinds of blocks: namespaces in use at a time, times their groups."""
    cell_hosts: int = 0
    """Hosts with one store.url; 0: all of them."""
    look_every_s: float = 5.0
    store_size: int = TIB
    """What a host remembers (store.size)."""
    keep_days: float = 1.0
    """After so long the bucket's rule removes what was put."""
    prefill_tokens_per_s: float = 10_000.0
    """Of a host."""
    list_s: float = 0.1
    get_s: float = 0.03
    """How long one listing and one short read take."""
    put_s: float = 0.2
    """How long it takes to put a pack."""
    prices: Prices = Prices()

    @property
    def sharing(self) -> int:
        """Hosts of one cell."""
        return min(self.cell_hosts or self.hosts, self.hosts)

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """What comes of it. Numbers are of the whole fleet, per second, unless their names say otherwise."""

    puts: float
    lists: float
    head_reads: float
    """Of packs that hosts come to know."""
    range_reads: float
    heads_read_again: float
    """Heads of packs from which a block is read, of which the host has kept no copy."""
    put_bytes: float
    read_bytes: float
    head_bytes: float
    kept_bytes: float
    kept_packs: float
    packs_per_s_of_cell: float
    packs_per_s_max: float
    """With more in a cell, its hosts do not come to know all of them."""
    pack_bytes: float
    known_after_s: float
    """How long it takes on average until another host knows of a block; infinite if it never does."""
    remembered_s: float
    """How far back store.size reaches."""
    remembered_bytes_per_host: float
    """Memory."""
    start_s: float
    """How long a host that starts reads heads until it knows everything that is kept, and what came
    meanwhile; infinite if it cannot follow."""
    start_reads: float
    host_read_bytes: float
    host_needs_bytes: float
    """Bytes a second that a host has to read at, so that loading is as fast as computing."""
    month_requests_cost: float
    month_kept_cost: float
    month_traffic_cost: float
    hosts_saved: float
    """So many hosts would compute what is read."""
    month_saved: float

    @property
    def keeps_up(self) -> bool:
        """Whether hosts come to know of everything."""
        return math.isfinite(self.known_after_s)

    @property
    def month_cost(self) -> float:
        return self.month_requests_cost + self.month_kept_cost + self.month_traffic_cost


def blocks_per_pack(block_bytes: int) -> int:
    """The blocks of a full pack."""
    return max(1, PACK_BYTES // block_bytes)


def pack_bytes(block_bytes: int, shards: int, blocks: int) -> int:
    """The length of an object with so many blocks: a head, and each shard filled up to ALIGNMENT."""
    return _up(HEAD_BYTES + RECORD_BYTES * shards * blocks) + blocks * shards * _up(block_bytes // shards)


def lists_per_look(names: int) -> int:
    """Listings of one look, if so many packs were made in the last ten minutes."""
    return 1 + names // LISTED_AT_ONCE


def mean_lists_per_look(packs_per_s: float) -> float:
    """The same in the mean, where so many packs come in a second."""
    return 1 + max(0.0, packs_per_s * WINDOW_S / LISTED_AT_ONCE - 0.5)


def packs_of_host(bytes_per_s: float, bursts_per_s: float, block_bytes: int) -> float:
    """Packs that one host puts in a second, if so many bytes come in so many bursts. What comes within
    LINGER_S of a burst goes with it; of what is larger than a pack, the last one is half full."""
    if bytes_per_s <= 0 or bursts_per_s <= 0:
        return 0.0
    gathered_per_s = bursts_per_s / (1 + bursts_per_s * LINGER_S)
    full = blocks_per_pack(block_bytes) * block_bytes
    per_gathering = bytes_per_s / gathered_per_s
    return gathered_per_s * (1.0 if per_gathering <= full else per_gathering / full + 0.5)


def packs_per_s_max(list_s: float, get_s: float) -> float:
    """Packs of which a host can come to know in a second, one listing and four rounds of reads for 64."""
    return 1 / (list_s / TOLD_AT_ONCE + get_s / HEADS_AT_ONCE)


def look_s(packs_per_s: float, others: float, look_every_s: float, list_s: float, get_s: float) -> float:
    """How long a host is busy with one look, if so many packs come in a second and `others` of them are not
    its own, and it also reads what comes meanwhile; infinite if more comes than it can read."""
    share = others / packs_per_s_max(list_s, get_s)
    if share >= 1:
        return math.inf
    return (mean_lists_per_look(packs_per_s) * list_s + share * look_every_s) / (1 - share)


def remembered_bytes(blocks: float, shards: int) -> float:
    """Memory of a host that remembers so many blocks of a store."""
    return blocks * (TABLE_BYTES + shards * (SLOT_RECORD_BYTES + LOCATION_BYTES))


def load(fleet: Fleet) -> Load:
    """What a fleet asks of its store, in the mean."""
    hosts, cells = fleet.hosts, fleet.hosts / fleet.sharing
    tokens_per_s = fleet.requests_per_s * fleet.prompt_tokens
    put_bytes = tokens_per_s * fleet.put_fraction * fleet.bytes_per_token
    read_bytes = tokens_per_s * fleet.read_fraction * fleet.bytes_per_token
    bursts = fleet.requests_per_s * fleet.putting_fraction / hosts
    # Blocks of several groups go into packs of their own, of the same bytes together.
    per_host = fleet.groups * packs_of_host(put_bytes / hosts / fleet.groups, bursts, fleet.block_bytes)
    puts = hosts * per_host
    mean_pack = put_bytes / puts if puts else 0.0
    of_group = per_host * fleet.sharing / fleet.groups
    others = of_group * (fleet.sharing - 1) / fleet.sharing
    list_s, get_s = fleet.list_s * fleet.groups, fleet.get_s * fleet.groups
    most = packs_per_s_max(list_s, get_s)
    busy_s = look_s(of_group, others, fleet.look_every_s, list_s, get_s)
    if math.isfinite(busy_s):
        period_s = fleet.look_every_s + busy_s
        more = max(0.0, others * period_s / TOLD_AT_ONCE - 0.5)  # the last listing is half used
        lists_per_s = (mean_lists_per_look(of_group) + more) / period_s
        followed = others
        # What comes while heads are read is read by the same look.
        waited_s = fleet.look_every_s + mean_lists_per_look(of_group) * list_s
        known_after_s = LINGER_S + fleet.put_s + waited_s / 2
    else:  # a host reads heads as fast as it can
        known_after_s = math.inf
        lists_per_s, followed = most / TOLD_AT_ONCE, most
    lists, head_reads = (hosts * fleet.groups * each for each in (lists_per_s, followed))
    head_size = min(float(HEAD_READ_BYTES), mean_pack)
    packs_read = read_bytes / mean_pack if mean_pack else 0.0
    ranges = packs_read * RANGES_PER_READ
    kept_s = fleet.keep_days * DAY_S
    kept_packs = puts * kept_s
    heads_again = packs_read * max(0.0, 1 - HEADS_KEPT / max(HEADS_KEPT, kept_packs / cells))
    # A host remembers what it has put itself, and what it has followed.
    learnt_bytes = put_bytes / hosts + followed * fleet.groups * mean_pack
    remembered_s = min(kept_s, fleet.store_size / learnt_bytes if learnt_bytes else math.inf)
    remembered = min(fleet.store_size, learnt_bytes * kept_s) / fleet.block_bytes
    prices = fleet.prices
    gets = head_reads + heads_again + ranges
    requests = puts * prices.per_put + lists * prices.per_list + gets * prices.per_get
    head_bytes = (head_reads + heads_again) * head_size
    traffic = put_bytes * prices.per_gb_in + (read_bytes + head_bytes) * prices.per_gb_out
    saved = tokens_per_s * fleet.read_fraction / fleet.prefill_tokens_per_s
    return Load(
        puts=puts,
        lists=lists,
        head_reads=head_reads,
        range_reads=ranges,
        heads_read_again=heads_again,
        put_bytes=put_bytes,
        read_bytes=read_bytes,
        head_bytes=head_bytes,
        kept_bytes=put_bytes * kept_s,
        kept_packs=kept_packs,
        packs_per_s_of_cell=of_group,
        packs_per_s_max=most,
        pack_bytes=mean_pack,
        known_after_s=known_after_s,
        remembered_s=remembered_s,
        remembered_bytes_per_host=remembered_bytes(remembered, fleet.shards)
        + of_group * fleet.groups * WINDOW_S * NAME_BYTES,
        start_s=kept_packs / cells / fleet.groups / (most - others) if others < most else math.inf,
        start_reads=kept_packs / cells,
        host_read_bytes=(read_bytes + head_bytes) / hosts,
        host_needs_bytes=fleet.prefill_tokens_per_s * fleet.bytes_per_token,
        month_requests_cost=requests * MONTH_S,
        month_kept_cost=put_bytes * kept_s / GB * prices.per_gb_month,
        month_traffic_cost=traffic / GB * MONTH_S,
        hosts_saved=saved,
        month_saved=saved * prices.per_host_hour * MONTH_S / 3_600,
    )


def _up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
