"""An encrypted slab: what lies in it tells nothing, and whatever is done to it, no other byte comes back."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from kvtier_kernels import xxh3_64
from kvtierd.core.blocks.namespaces import TAG_BYTES, tag_of
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.tiers.disk.keys import FIELD
from kvtierd.wire import worker_pb2 as wire

from tests.integration.disk.conftest import ALSO_ENCRYPTED, NewFront, make_key
from tests.integration.disk.rig import SPACE, TAG, Block, Front, Place

SIZE = 50_000
BLOCKS = [Block(key, SIZE) for key in range(1, 5)]


def fill(front: Front) -> list[Place]:
    front.start()
    return front.write(*[front.store(block) for block in BLOCKS])


@pytest.fixture
def encrypted(new_front: NewFront, keys: Path) -> Front:
    return new_front(keys=keys)


def assert_none_served(front: Front, places: list[Place], wrong: list[int]) -> None:
    """Reads these: those at the positions `wrong` are corrupt, the others are right."""
    finished, host = front.read(*places)
    assert finished.corrupt == wrong
    assert finished.failed == []
    for row, place in enumerate(host):
        assert front.on_host(place) == (row not in wrong)
        assert not front.pool.records.check(place.slots, place.generations).any(), "nothing is READY yet"


@ALSO_ENCRYPTED
def test_the_plaintext_is_in_the_slab_only_if_it_is_not_encrypted(
    new_front: NewFront,
) -> None:
    front = new_front()
    fill(front)
    assert front.worker.stop() == 0
    found = front.slab.read_bytes()
    is_plain = front.keys is None
    for block in BLOCKS:
        data = block.data(0).tobytes()
        for part in (data[:64], data[SIZE // 2 :][:64], data[-64:]):
            assert (part in found) == is_plain
        checksum = int(xxh3_64(block.data(0))).to_bytes(8, "little")
        assert (checksum in found) == is_plain, "nor is a checksum of the plaintext"
        assert block.hash.tobytes() in found, "hashes stay in clear"


def test_data_that_was_moved_between_slots_is_corrupt(encrypted: Front) -> None:
    places = fill(encrypted)
    with encrypted.slab.open("r+b") as file:
        offsets = [int(place.slots[0]) * PAGE_BYTES for place in places[:2]]
        data = []
        for offset in offsets:
            file.seek(offset)
            data.append(file.read(SIZE))
        assert data[0] != data[1]
        for offset, other in zip(offsets, reversed(data), strict=True):
            file.seek(offset)
            file.write(other)
    assert encrypted.check(*places).corrupt == [0, 1]
    assert_none_served(encrypted, places, [0, 1])


def swap_records(front: Front, one: Place, other: Place, words: slice) -> None:
    """Exchanges these words of two records in the image, with checksums that fit."""
    image, kept = front.image._array, front.image.records
    records = []
    for place in (one, other):
        extent = int(front.image.geometry.extent_of(place.slots)[0])
        info = kept.extent_info(extent)
        assert info is not None
        row = (int(place.slots[0]) * PAGE_BYTES - info[3]) // info[1]
        records.append(image[kept.table_range(extent)[0] + row * 128 :][:128].view("<u8"))
    saved = records[0][words].copy()
    records[0][words] = records[1][words]
    records[1][words] = saved
    for record in records:
        covered = np.concatenate([record[1:13], [record[0] >> np.uint64(24)]]).astype("<u8")
        record[13] = xxh3_64(covered)


ALL_BUT_THE_WORD = slice(1, 16)
HASH_ONLY = slice(5, 9)
TAG_ONLY = slice(14, 16)
SUM_ONLY = slice(12, 13)


@pytest.mark.parametrize("words", [HASH_ONLY, TAG_ONLY, SUM_ONLY], ids=["hash", "tag", "checksum"])
def test_a_record_that_was_changed_is_corrupt(encrypted: Front, words: slice) -> None:
    places = fill(encrypted)
    swap_records(encrypted, places[0], places[1], words)
    assert encrypted.check(*places).corrupt == [0, 1]
    encrypted.assert_reads_back(*places[2:])


def test_a_block_that_was_moved_with_its_record_is_corrupt(encrypted: Front) -> None:
    places = fill(encrypted)
    one, other = places[0], places[1]
    swap_records(encrypted, one, other, ALL_BUT_THE_WORD)
    with encrypted.slab.open("r+b") as file:
        offsets = [int(place.slots[0]) * PAGE_BYTES for place in (one, other)]
        data = []
        for offset in offsets:
            file.seek(offset)
            data.append(file.read(SIZE))
        for offset, moved in zip(offsets, reversed(data), strict=True):
            file.seek(offset)
            file.write(moved)
    here = [Place(BLOCKS[1], one.slots, one.generations), Place(BLOCKS[0], other.slots, other.generations)]
    assert_none_served(encrypted, here, [0, 1])


def test_no_generation_of_a_slot_is_encrypted_twice(encrypted: Front) -> None:
    encrypted.start()
    host = encrypted.store(BLOCKS[0])
    encrypted.faults(write={"errno": "EIO"})
    job, disk = encrypted.post_write([host])
    assert encrypted.worker.wait(job).failed == [0]
    encrypted.faults()
    again = encrypted.worker.wait(encrypted.post(wire.DISK_WRITE, disk, [host]))
    assert (again.failed, again.error) == ([0], "")
    for place in disk:
        encrypted.free("disk", place)
    encrypted.assert_reads_back(*encrypted.write(host))


def test_the_same_block_is_encrypted_otherwise_each_time(encrypted: Front) -> None:
    encrypted.start()
    host = encrypted.store(BLOCKS[0])
    seen = set()
    for _ in range(3):
        [place] = encrypted.write(host)
        offset = int(place.slots[0]) * PAGE_BYTES
        seen.add(encrypted.slab.read_bytes()[offset : offset + SIZE])
        encrypted.free("disk", place)
    assert len(seen) == 3


class TestRestart:
    def test_an_image_whose_generations_go_back_leads_to_other_nonces_or_keys(
        self, new_front: NewFront, keys: Path
    ) -> None:
        """The slab is restored from a snapshot, and the same slot is written again, with the same generation
        and in a boot with the same nonce: were the same key and nonce used, the XOR of the ciphertexts would
        be that of the plaintexts."""
        front = new_front(keys=keys)
        fill(front)
        front.worker.stop()
        snapshot = front.slab.read_bytes()
        texts, plains = [], []
        for version in (1, 2):
            front.slab.write_bytes(snapshot)
            front = new_front(keys=keys)
            front.start()
            block = Block(77, SIZE, version)
            [place] = front.write(front.store(block))
            offset = int(place.slots[0]) * PAGE_BYTES
            texts.append((place.slots[0], place.generations[0], front.slab.read_bytes()[offset:][:SIZE]))
            plains.append(block.data(0))
            front.worker.stop()
        assert texts[0][:2] == texts[1][:2], "the same slot and generation"
        difference = np.bitwise_xor(*(np.frombuffer(each[2], np.uint8) for each in texts))
        assert not np.array_equal(difference, np.bitwise_xor(*plains))

    def test_blocks_come_back_and_can_be_added_to(self, new_front: NewFront, keys: Path) -> None:
        front = new_front(keys=keys)
        fill(front)
        front = new_front(keys=keys)
        assert front.start().cold_reason == ""
        found = front.recovered(BLOCKS)
        assert len(found) == len(BLOCKS)
        front.assert_reads_back(*found)
        front.assert_reads_back(*front.write(front.store(Block(9, SIZE))))

    def test_with_other_keys_it_is_cold(self, new_front: NewFront, keys: Path) -> None:
        front = new_front(keys=keys)
        fill(front)
        make_key(keys)
        front = new_front(keys=keys)
        assert "none of the keys" in front.start().cold_reason
        assert front.recovery.blocks == 0
        front.assert_reads_back(*front.write(front.store(BLOCKS[0])))

    @pytest.mark.parametrize("was_encrypted", [True, False])
    def test_a_slab_of_the_other_kind_is_cold(
        self, new_front: NewFront, keys: Path, was_encrypted: bool
    ) -> None:
        front = new_front(keys=keys if was_encrypted else None)
        fill(front)
        front = new_front(keys=None if was_encrypted else keys)
        reason = front.start().cold_reason
        assert reason == f"the slab is {'encrypted' if was_encrypted else 'plain'}, and is to be " + (
            "plain" if was_encrypted else "encrypted"
        )
        assert front.recovery.blocks == 0
        front.assert_reads_back(*front.write(front.store(BLOCKS[0])))
        found = front.slab.read_bytes()
        assert BLOCKS[1].data(0).tobytes()[:64] not in found, "the file holds nothing of the old slab"

    def test_a_tenants_blocks_are_gone_with_its_key_and_nobody_elses(
        self, new_front: NewFront, keys: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tenant = "research"
        monkeypatch.setattr("tests.integration.disk.rig.SPACE", SPACE[:12] + tag_bytes(tenant))
        own = make_key(keys, tenant)
        front = new_front(keys=keys)
        front.start()
        front.write(front.store(BLOCKS[0]))
        monkeypatch.setattr("tests.integration.disk.rig.SPACE", SPACE)
        front.write(front.store(BLOCKS[1]))
        own.unlink()
        for _ in range(2):
            front = new_front(keys=keys)
            assert front.start().cold_reason == ""
            assert front.recovery.recovered.corrupt.tolist() == []
            [left] = front.recovered(BLOCKS[:2])
            assert left.block == BLOCKS[1]
            front.assert_reads_back(left)

    def test_a_damaged_key_table_is_a_cold_start(self, new_front: NewFront, keys: Path) -> None:
        front = new_front(keys=keys)
        fill(front)
        front.worker.stop()
        with front.slab.open("r+b") as file:
            file.seek(PAGE_BYTES + 30)
            file.write(b"\xff\x00\xff")
        front = new_front(keys=keys)
        assert "key table is damaged" in front.start().cold_reason

    def test_a_later_worker_of_the_boot_refuses_other_keys(self, encrypted: Front, keys: Path) -> None:
        fill(encrypted)
        encrypted.worker.stop()
        make_key(keys, "another")
        refused = encrypted.spawn(load=False).unusable()
        assert refused.field == FIELD
        assert "have changed since the daemon's start" in refused.message
        (keys / "another").unlink()
        encrypted.respawn()


class TestWithoutAKey:
    def test_nothing_of_such_a_tenant_is_written(
        self, encrypted: Front, keys: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        shutil.rmtree(keys)
        make_key(keys, "somebody")
        encrypted.start()
        before = encrypted.slab.read_bytes()
        for block in BLOCKS[:2]:
            job, disk = encrypted.post_write([encrypted.store(block)])
            finished = encrypted.worker.wait(job)
            assert (finished.failed, finished.error, finished.moved_bytes) == ([0], "", 0)
            assert not encrypted.is_ready(disk[0])
        offset = int(disk[0].slots[0]) * PAGE_BYTES
        assert not any(encrypted.slab.read_bytes()[offset : offset + SIZE]), "and not in plain"
        assert len(before) == encrypted.slab.stat().st_size
        encrypted.worker.stop()
        said = [line for line in capfd.readouterr().err.splitlines() if "there is no key for it" in line]
        assert len(said) == 1
        assert f"{TAG:08x}" in said[0]

    def test_a_worker_without_usable_keys_says_what_to_do(self, encrypted: Front, keys: Path) -> None:
        (keys / "default").chmod(0o644)
        refused = encrypted.spawn(load=True).unusable()
        assert refused.field == FIELD
        assert f"chmod 400 {keys / 'default'}" in refused.message


def tag_bytes(tenant: str) -> bytes:
    return int(tag_of(tenant)).to_bytes(TAG_BYTES, "big")
