"""What one tenant can see of another: nothing in index pages, nothing in lookups, and of metrics and status
only what the operator wants everybody to see."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier.v1 import admin_pb2, side_pb2, types_pb2
from kvtier_kernels import IndexReader

from tests.integration.daemon.raw import RawSession, Refused, hashes
from tests.security.caller import Caller
from tests.security.conftest import As, Start
from tests.security.people import ATTACKER, VICTIM, being, kvtierctl
from tests.support.process import Daemon, until

BLOCKS = 16
IDS = list(range(BLOCKS))
HEADER_BYTES = 4096
"""Of an index page: what follows are the words that stand for blocks."""


class Page:
    """The index page of a session's only group, as a client has it."""

    def __init__(self, session: RawSession) -> None:
        _, [self.fd] = session.side.call(open_index=side_pb2.OpenIndex(group=0))
        self.about = os.fstat(self.fd)
        self._memory = mmap.mmap(self.fd, self.about.st_size, prot=mmap.PROT_READ)
        self._reader = IndexReader(self._memory, 32)
        until(lambda: self._reader.complete, "the page is complete")

    def shows(self, keys: bytes) -> int:
        """How many of these blocks are there, from the first on."""
        each = [keys[at : at + 32] for at in range(0, len(keys), 32)]
        return self._reader.run(each, 0, len(each))

    @property
    def words(self) -> int:
        """How many words of the page are not empty."""
        return int(np.count_nonzero(np.frombuffer(self._memory, np.uint64, offset=HEADER_BYTES)))

    def close(self) -> None:
        os.close(self.fd)


def stored(session: RawSession, keys: bytes) -> None:
    assert session.store(keys, IDS).state == types_pb2.TRANSFER_STATE_DONE


def namespace(**changes: Any) -> types_pb2.Namespace:
    fields: dict[str, Any] = {"model": "tiny", "kv_dtype": "uint8", "hash_scheme": "test:1", "hash_bytes": 32}
    return types_pb2.Namespace(**(fields | changes))


class TestIndexPages:
    def test_a_page_shows_nothing_of_another_tenants_blocks(self, daemon: Daemon, connect: As) -> None:
        keys, others = hashes(BLOCKS), hashes(BLOCKS, seed=2)
        victim, attacker = connect(VICTIM).ready(), connect(ATTACKER).ready()
        stored(victim, others)
        theirs, own = Page(attacker), Page(victim)
        assert own.shows(others) == BLOCKS, "the control: what was there is filled in"
        stored(victim, keys)
        assert own.shows(keys) == BLOCKS, "the control: what comes later is added"
        assert (theirs.shows(keys), theirs.shows(others), theirs.words) == (0, 0, 0)
        stored(attacker, keys)
        assert (theirs.shows(keys), theirs.shows(others), theirs.words) == (BLOCKS, 0, BLOCKS)
        assert own.words == 2 * BLOCKS, "the same hashes of another tenant add nothing"
        assert theirs.about.st_ino != own.about.st_ino
        for page in (theirs, own):
            page.close()

    def test_no_claim_opens_the_page_of_another_namespace(self, daemon: Daemon, connect: As) -> None:
        keys = hashes(BLOCKS)
        victim = connect(VICTIM).ready(secret=b"secret")
        stored(victim, keys)
        pages = [Page(victim)]
        claims: list[dict[str, Any]] = [
            {"secret": b"secret"},
            {"namespace": namespace(tenant=f"uid:{VICTIM}")},
            {"namespace": namespace(tenant=str(VICTIM), model="tiny")},
            {"namespace": namespace(salt="x")},
        ]
        for number, claim in enumerate(claims):
            liar = connect(ATTACKER).ready(**({"instance": f"liar {number}"} | claim))
            pages.append(Page(liar))
        pages.append(Page(connect(VICTIM).ready(instance="salted", namespace=namespace(salt="x"))))
        assert [page.words for page in pages] == [BLOCKS] + [0] * (len(pages) - 1)
        assert [page.shows(keys) for page in pages] == [BLOCKS] + [0] * (len(pages) - 1)
        shared = Page(connect(VICTIM).ready(instance="another"))
        assert shared.about.st_ino == pages[0].about.st_ino, "the control: engines of a namespace share one"
        for page in [*pages, shared]:
            page.close()

    def test_only_the_scheduler_of_an_instance_opens_its_pages(self, daemon: Daemon, connect: As) -> None:
        connect(VICTIM).ready()
        attacker = connect(ATTACKER).ready()
        for group in (1, 2**32 - 1):
            with pytest.raises(Refused) as refused:
                attacker.side.call(open_index=side_pb2.OpenIndex(group=group))
            assert refused.value.reason == "UNKNOWN_GROUP"
        stranger = connect(ATTACKER)
        stranger.side.open()
        with pytest.raises(Refused) as refused:
            stranger.side.call(open_index=side_pb2.OpenIndex(group=0))
        assert refused.value.reason == "NOT_ATTACHED"
        rank = connect(ATTACKER)
        rank.attach(role=types_pb2.ROLE_RANK, instance="ranks")
        with pytest.raises(Refused) as refused:
            rank.side.call(open_index=side_pb2.OpenIndex(group=0))
        assert refused.value.reason == "ROLE"

    def test_a_page_cannot_be_written(self, daemon: Daemon, connect: As) -> None:
        """What an engine wrote into a page, other engines of its tenant would believe."""
        page = Page(connect(ATTACKER).ready())
        size = page.about.st_size
        with pytest.raises(PermissionError):
            mmap.mmap(page.fd, size)
        with pytest.raises(PermissionError):
            os.pwrite(page.fd, b"x", HEADER_BYTES)
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, 0)
        again = os.open(f"/proc/self/fd/{page.fd}", os.O_RDWR)  # as root, who may open everything
        with pytest.raises(PermissionError):
            mmap.mmap(again, size)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", HEADER_BYTES)
        os.close(again)
        page.close()
        folder = f"/proc/{daemon.pid}/fd"
        assert any("kvtierd-index" in os.readlink(f"{folder}/{name}") for name in os.listdir(folder))
        with being(ATTACKER), pytest.raises(PermissionError):
            os.listdir(folder)


def test_lookups_do_not_bring_up_blocks_of_others(start: Start, connect: As, tmp_path: Path) -> None:
    tier = {"disk__paths": tmp_path, "disk__size": "66MiB", "disk__extent_size": "1MiB"}
    tier |= {"disk__write_mode": "through", "disk__recompute_if_faster": False}
    daemon = start(pool__size="6MiB", pool__extent_size="1MiB", **tier)
    victim, attacker = connect(VICTIM).ready(), connect(ATTACKER).ready()
    keys = hashes(BLOCKS)
    stored(victim, keys)
    until(lambda: daemon.status().disks[0].written_blocks == BLOCKS, "the disk has them")
    for number in range(30):
        stored(victim, hashes(BLOCKS, seed=1 + number))
    for mode in ({}, {"lease": True}):
        found = attacker.lookup(keys, **mode)
        nobodys = attacker.lookup(hashes(BLOCKS, seed=99_999), **mode)
        assert found == nobodys
        assert (found.answers[0].hits, set(found.answers[0].states) & {2}) == (0, set())
    assert daemon.status().counters.promoted_blocks == 0
    assert not daemon.status().disks[0].reading_bytes
    until(lambda: victim.lookup(keys).answers[0].hits == BLOCKS, "the control: its own are brought up")
    assert daemon.status().counters.promoted_blocks >= BLOCKS


class TestFigures:
    def test_status_shows_each_tenant_to_itself_and_all_to_operators(
        self, daemon: Daemon, connect: As
    ) -> None:
        victim = connect(VICTIM).ready()
        stored(victim, hashes(BLOCKS))
        victim.load(hashes(BLOCKS), IDS)
        connect(ATTACKER).ready()
        rows = {who: rows_of(daemon, connect(who)) for who in (0, VICTIM, ATTACKER)}
        assert list(rows[0]) == [f"uid:{VICTIM}", f"uid:{ATTACKER}"]
        assert list(rows[VICTIM]) == [f"uid:{VICTIM}"]
        assert list(rows[ATTACKER]) == [f"uid:{ATTACKER}"]
        own = rows[VICTIM][f"uid:{VICTIM}"]
        assert (own.host_blocks, own.stored_blocks, own.loaded_blocks) == (BLOCKS, BLOCKS, BLOCKS)
        assert own.stored_bytes == own.loaded_bytes == BLOCKS * 12_288
        assert (own.guaranteed_fraction, own.instances, own.sessions) == (0.5, 1, 1)
        assert rows_of(daemon, None) == {}, "a caller that does not say who it is"
        said = kvtierctl(ATTACKER, daemon.socket, "status").stdout
        [table] = [line for line in said.splitlines() if "uid:" in line]
        assert table.split()[:5] == [f"uid:{ATTACKER}", "0", "B", "0", "B"]

    def test_a_tenant_of_an_earlier_daemon_is_known_by_its_tag_until_it_comes(
        self, start: Start, connect: As
    ) -> None:
        first = start()
        session = connect(VICTIM).ready()
        stored(session, hashes(BLOCKS))
        session.close()
        first.kill()
        daemon = start()
        [unknown] = rows_of(daemon, connect(0))
        assert unknown.startswith("tag:")
        assert rows_of(daemon, connect(ATTACKER)) == {}
        [(name, own)] = rows_of(daemon, connect(VICTIM)).items()
        assert (name, own.host_blocks) == (f"uid:{VICTIM}", BLOCKS)
        connect(VICTIM).ready()
        assert list(rows_of(daemon, connect(0))) == [f"uid:{VICTIM}"]

    def test_metrics_name_tenants_only_if_the_operator_says_so(self, start: Start, connect: As) -> None:
        daemon = start()
        stored(connect(VICTIM).ready(), hashes(BLOCKS))
        assert not [name for name in daemon.metrics() if "tenant" in name or str(VICTIM) in name]
        daemon.stop()
        daemon = start(metrics__by_tenant=True, pool__path=daemon.pool)
        found = daemon.metrics()
        assert not [name for name in found if str(VICTIM) in name], "it is not known who that is"
        victim, attacker = connect(VICTIM).ready(), connect(ATTACKER).ready()
        keys = hashes(BLOCKS, seed=5)
        stored(victim, keys)
        assert attacker.lookup(keys).answers[0].hits == 0
        assert victim.lookup(keys).answers[0].hits == BLOCKS
        found = daemon.metrics()
        assert found[f"kvtier_tenant_blocks.uid:{VICTIM}.host"] == 2 * BLOCKS
        assert found[f"kvtier_tenant_blocks.uid:{ATTACKER}.host"] == 0
        assert found[f"kvtier_tenant_store_bytes_total.uid:{VICTIM}"] == BLOCKS * 12_288
        assert found[f"kvtier_tenant_lookup_hashes_total.uid:{ATTACKER}"] == BLOCKS
        assert found[f"kvtier_tenant_lookup_hits_total.uid:{ATTACKER}"] == 0
        assert found[f"kvtier_tenant_lookup_hits_total.uid:{VICTIM}"] == BLOCKS
        assert found[f"kvtier_tenant_guaranteed_fraction.uid:{VICTIM}"] == 0.5
        assert found[f"kvtier_tenant_sessions.uid:{ATTACKER}"] == 1


def rows_of(daemon: Daemon, session: RawSession | None) -> dict[str, admin_pb2.TenantStatus]:
    """What status tells the user of a session of each tenant."""
    caller = Caller(daemon, session)
    found = {each.tenant: each for each in caller.status().tenants}
    caller.close()
    return found
