"""What a real daemon tells real subscribers of blocks that are stored, evicted, cleared, written and
promoted."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from tests.integration.stores.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.events import CPU, STORAGE, EventPlace, Subscriber, as_ints, event_place, replay
from tests.support.hosts import NewHost
from tests.support.plain_client import BLOCKS, NAMESPACE, PlainClient, block_hashes

SMALL = {"pool__size": "4MiB", "pool__extent_size": "1MiB"}
"""Room for about 125 blocks."""
HASHES = block_hashes("prompt", range(24))


def fill(client: PlainClient, batches: int = 4) -> list[bytes]:
    """Stores so many batches of other blocks."""
    hashes = block_hashes("other", range(batches * BLOCKS))
    for first in range(0, len(hashes), BLOCKS):
        assert client.store(hashes[first : first + BLOCKS]).done
    return hashes


def found(client: PlainClient, hashes: list[bytes]) -> set[bytes]:
    """Those of the hashes that the daemon has now, in its memory."""
    states = [client.lookup([each]).hits for each in hashes]
    return {each for each, hit in zip(hashes, states, strict=True) if hit}


def on_disk(host: DaemonHost, blocks: int) -> None:
    """Waits until the only disk has so many blocks."""
    until(lambda: [disk.blocks for disk in host.status().disks] == [blocks], f"{blocks} are on the disk")


def ctl(host: DaemonHost, *arguments: str) -> str:
    command = [sys.executable, "-m", "kvtierd.ctl", *arguments, f"--socket={host.socket}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_what_is_stored_is_told(new_host: NewHost, connect_to: Connect, place: EventPlace) -> None:
    host = new_host(**place.settings, events__host="node-7")
    with Subscriber(place) as router:
        assert connect_to(host).store(HASHES).done
        router.until_has(CPU, as_ints(HASHES))
        [topic] = router.streams
        namespace = host.status().instances[0].namespace_digest
        assert topic == f"kvtier@node-7@tests/plain@{namespace}".encode()
        [stored] = [each for message in router.messages for each in message.events if "medium" in each]
        assert stored == {
            "type": "BlockStored",
            "block_hashes": [int.from_bytes(each[-8:], "big") for each in HASHES],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 16,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "locality": "LOCAL",
            "ownership": "kvtier",
        }
        assert router.only.number == router.messages[0].number + len(router.messages) - 1


def test_what_is_evicted_is_told(new_host: NewHost, connect_to: Connect, place: EventPlace) -> None:
    host = new_host(**place.settings, **SMALL)
    client = connect_to(host)
    with Subscriber(place) as router:
        stored = [*HASHES, *fill(client)] if client.store(HASHES).done else []
        assert host.status().counters.evicted_blocks > 0
        there = found(client, stored)
        assert len(there) < len(stored)
        router.until_has(CPU, as_ints(list(there)))
        events = host.status().events
        assert events.stored_blocks - events.removed_blocks == len(there)


def test_what_is_cleared_is_told(new_host: NewHost, connect_to: Connect, place: EventPlace) -> None:
    host = new_host(**place.settings)
    with Subscriber(place) as router:
        assert connect_to(host).store(HASHES).done
        router.until_has(CPU, as_ints(HASHES))
        ctl(host, "clear", "--yes")
        router.until_has(CPU, set())
        assert router.only.clears == 1, "it was told block by block"


def test_a_block_on_a_disk_only(
    new_host: NewHost, connect_to: Connect, place: EventPlace, tmp_path: Path
) -> None:
    """It is on both media, then on the disk only, then on both again."""
    disk = {"disk__paths": str(tmp_path), "disk__size": "34MiB", "disk__extent_size": "1MiB"}
    host = new_host(**place.settings, **SMALL, **disk, disk__write_mode="through")
    client = connect_to(host)
    with Subscriber(place) as router:
        assert client.store(HASHES).done
        router.until_has(STORAGE, as_ints(HASHES))
        assert router.only.has(CPU) == as_ints(HASHES)
        others = block_hashes("other", range(4 * BLOCKS))
        for first in range(0, len(others), BLOCKS):  # each is written before the next ones need its room
            on_disk(host, len(HASHES) + first)
            assert client.store(others[first : first + BLOCKS]).done
        on_disk(host, len(HASHES) + len(others))
        router.until_has(STORAGE, as_ints([*HASHES, *others]))
        assert not router.only.has(CPU) & as_ints(HASHES)
        until(lambda: client.load(HASHES) == len(HASHES), "they come up again")

        def promoted() -> bool:
            router.take()
            return router.only.has(CPU) >= as_ints(HASHES)

        until(promoted, "the router knows")
        assert router.only.has(STORAGE) >= as_ints(HASHES)


def test_namespaces_have_topics_of_their_own(
    new_host: NewHost, connect_to: Connect, place: EventPlace
) -> None:
    """Their blocks have the same hashes, as those of one prompt have in two models."""
    host = new_host(**place.settings)
    one = connect_to(host)
    other = connect_to(host, "other", namespace=dataclasses.replace(NAMESPACE, model="another"))
    with Subscriber(place) as router:
        assert one.store(HASHES).done
        assert other.store(HASHES[:3]).done

        def both() -> bool:
            router.take()
            return sorted(len(known.has(CPU)) for known in router.streams.values()) == [3, len(HASHES)]

        until(both, "both are told of")
        by_model = {topic.split(b"@")[2]: known for topic, known in router.streams.items()}
        assert by_model[b"another"].has(CPU) == as_ints(HASHES[:3])
    assert len({message.topic for message in replay(place, 0)}) == 2
    assert replay(place, 0, topic=None) == [], "without topics they could not be told apart"


def test_only_tenants_who_agreed_are_told_of(
    new_host: NewHost, connect_to: Connect, place: EventPlace
) -> None:
    settings = place.settings | {"events__tenants": "research"}
    silent = new_host(**settings, server__tenants="*=production")
    assert connect_to(silent).store(HASHES).done
    with event_place() as open_place:
        settings = open_place.settings | {"events__tenants": "production, research"}
        told = new_host(**settings, server__tenants="*=production")
        with Subscriber(open_place) as router, Subscriber(place) as nosy:
            assert connect_to(told).store(HASHES).done
            router.until_has(CPU, as_ints(HASHES))
            nosy.take()
            assert nosy.messages == []
    assert replay(place, 0) == []
    assert silent.status().events.streams == 0


def test_it_goes_on_without_engines(new_host: NewHost, connect_to: Connect, place: EventPlace) -> None:
    """The engine ends, and another one begins. Routers hear nothing of that, because nothing changes."""
    host = new_host(**place.settings)
    with Subscriber(place) as router:
        client = connect_to(host)
        assert client.store(HASHES).done
        router.until_has(CPU, as_ints(HASHES))
        client.close()
        again = connect_to(host, "again")
        assert again.load(HASHES) == len(HASHES)
        assert again.store(block_hashes("more", range(2))).done
        router.until_has(CPU, as_ints([*HASHES, *block_hashes("more", range(2))]))
        assert router.only.clears == 1
        assert router.only.strict
