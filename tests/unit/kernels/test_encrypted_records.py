"""Records of a slab of format 2, whose slots hold ciphertext."""

import numpy as np
import numpy.typing as npt
import pytest
from kvtier_kernels import PoolRecords, format_pool

MIB = 1 << 20
SALT = 0x1234_5678_9ABC


def records(*, encrypted: bool = True) -> PoolRecords:
    pool = np.zeros(4 * MIB, np.uint8)
    format_pool(pool, MIB, 2, bytes(16), encrypted=encrypted)
    made = PoolRecords(pool)
    made.format_extent(0, 5000)
    assert made.encrypted == encrypted
    return made


def slots(made: PoolRecords, count: int) -> npt.NDArray[np.uint32]:
    info = made.extent_info(0)
    assert info is not None
    return (info[3] // 4096 + np.arange(count) * info[1] // 4096).astype(np.uint32)


def opened(made: PoolRecords, count: int = 2) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    places = slots(made, count)
    hashes = np.arange(count * 32, dtype=np.uint8).reshape(count, 32)
    return places, made.open(places, 1, 7, 8, b"n" * 16, 0, 0, 1, hashes, 5000)


def test_a_generation_is_claimed_once():
    made = records()
    places, generations = opened(made)
    assert made.claim(places, generations + np.uint64(1), SALT).tolist() == [0, 0]
    assert made.claim(places[:1], generations[:1], SALT).tolist() == [1]
    assert made.claim(places, generations, SALT + 1).tolist() == [0, 1]
    assert (made.copies(places)[:, 10] >> np.uint64(16)).tolist() == [SALT, SALT + 1]
    made.free(places)
    assert made.claim(places, made.generations(places), SALT).tolist() == [0, 0], "not while FREE"
    _, generations = opened(made)
    assert made.claim(places, generations, SALT).tolist() == [1, 1]


def test_a_record_is_believed_only_with_its_salt_and_keeps_its_tag():
    made = records()
    places, generations = opened(made)
    made.claim(places[:1], generations[:1], SALT)
    tags = np.arange(32, dtype=np.uint8).reshape(2, 16)
    made.set_tags(places, generations, np.array([5, 6], np.uint64), tags)
    made.commit(places, np.array([1, 2], np.uint64))
    assert made.check(places, generations).tolist() == [1, 0]
    copies = made.copies(places)
    assert copies[:, 12].tolist() == [5, 6]
    assert copies[:, 14:].view(np.uint8).tolist() == tags.tolist()
    assert made.scan()["intact"].tolist() == [1, 0]
    assert made.scan()["worlds"].tolist() == [1, 1]


def test_it_matches_a_record_of_the_pool_whatever_its_salt():
    made, host = records(), records(encrypted=False)
    places, generations = opened(made)
    there, host_generations = opened(host)
    host.set_data_checksums(there, host_generations, np.array([3, 4], np.uint64))
    host.commit(there, np.array([1, 2], np.uint64))
    made.claim(places[:1], generations[:1], SALT)
    assert made.match(places, generations, host, there, host_generations).tolist() == [1, 1]


def test_tags_of_slots_that_are_not_being_written_are_refused():
    made = records()
    places, generations = opened(made)
    tags = np.zeros((2, 16), np.uint8)
    with pytest.raises(ValueError, match="expected WRITING with generation"):
        made.set_tags(places, generations + np.uint64(1), np.zeros(2, np.uint64), tags)
    with pytest.raises(ValueError, match="tags"):
        made.set_tags(places, generations, np.zeros(2, np.uint64), tags[:, :8])


def test_nothing_of_a_pool_can_be_encrypted():
    made = records(encrypted=False)
    places, generations = opened(made)
    with pytest.raises(ValueError, match="nothing in it is encrypted"):
        made.claim(places, generations, SALT)
    with pytest.raises(ValueError, match="nothing in it is encrypted"):
        made.set_tags(places, generations, np.zeros(2, np.uint64), np.zeros((2, 16), np.uint8))


@pytest.mark.parametrize("salt", [0, 1 << 48])
def test_salts_have_48_bits_and_are_not_zero(salt: int):
    made = records()
    places, generations = opened(made)
    with pytest.raises(ValueError, match="salt"):
        made.claim(places, generations, salt)
