import os
from pathlib import Path

import pytest
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.ids import TenantTag
from kvtierd.tiers.disk.key_table import CHECK_BYTES, OFFSET, SLAB_ID_BYTES, KeyTable, unpack
from kvtierd.tiers.disk.keys import (
    KEYS_MAX,
    KeySet,
    KeyTroubleError,
    file_of_tenant,
    read_keys,
    tenant_of_file,
)

KEY = "00112233445566778899aabbccddeeff" * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    return folder


def write(folder: Path, name: str, text: str = KEY + "\n", mode: int = 0o400) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path


def trouble(folder: Path) -> str:
    with pytest.raises(KeyTroubleError) as caught:
        read_keys(folder)
    assert KEY not in str(caught.value)
    return str(caught.value)


class TestRead:
    def test_a_default_and_keys_of_tenants(self, folder: Path):
        write(folder, "default")
        write(folder, "research", "ff" * 32)
        write(folder, "uid:1001", "ee" * 32)
        write(folder, ".hidden", "no key")
        keys = read_keys(folder)
        assert keys.of(tag_of("research")) == b"\xff" * 32
        assert keys.of(tag_of("uid:1001")) == b"\xee" * 32
        assert keys.of(tag_of("anybody")) == bytes.fromhex(KEY)
        assert keys.writable is None

    def test_without_a_default_others_have_none(self, folder: Path):
        write(folder, "research")
        keys = read_keys(folder)
        assert keys.of(tag_of("anybody")) is None
        assert keys.writable == frozenset([tag_of("research")])

    def test_a_key_is_in_no_repr(self, folder: Path):
        write(folder, "default")
        assert KEY[:16] not in repr(read_keys(folder))
        assert bytes.fromhex(KEY) not in repr(read_keys(folder)).encode()

    @pytest.mark.parametrize(
        "text", ["", "\n", KEY[:-1], KEY + "0", KEY + "\n\n", KEY[:-1] + "g", "\0" * 32, KEY + " "]
    )
    def test_anything_but_64_digits_is_refused(self, folder: Path, text: str):
        path = write(folder, "default", text)
        message = trouble(folder)
        assert str(path) in message
        assert "openssl rand -hex 32" in message

    def test_capital_digits_and_no_end_of_line(self, folder: Path):
        write(folder, "default", KEY.upper())
        assert read_keys(folder).default == bytes.fromhex(KEY)


class TestPrivate:
    @pytest.mark.parametrize("mode", [0o440, 0o404, 0o620, 0o602])
    def test_a_file_that_others_may_use(self, folder: Path, mode: int):
        path = write(folder, "default", mode=mode)
        message = trouble(folder)
        assert f"the file {path} has mode {mode:04o}" in message
        assert f"chmod 400 {path}" in message

    @pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
    def test_a_folder_that_others_may_use(self, folder: Path, mode: int):
        write(folder, "default")
        folder.chmod(mode)
        message = trouble(folder)
        assert f"the folder {folder} has mode {mode:04o}" in message
        assert f"chmod 700 {folder}" in message

    def test_a_file_of_somebody_else(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        path = write(folder, "default")
        if os.geteuid() == 0:
            os.chown(path, 4711, -1)
            assert f"the file {path} belongs to uid 4711, this daemon runs as 0" in trouble(folder)
        else:
            monkeypatch.setattr("kvtierd.tiers.disk.keys.os.geteuid", lambda: 4711)
            assert f"belongs to uid {os.getuid()}, this daemon runs as 4711" in trouble(folder)

    def test_other_things_than_files(self, folder: Path):
        (folder / "a").symlink_to(write(folder, "default"))
        assert "symbolic link" in trouble(folder)
        (folder / "a").unlink()
        os.mkfifo(folder / "a", 0o400)
        assert "not a regular file" in trouble(folder)

    def test_no_folder_no_key_and_a_file(self, folder: Path):
        assert "there is no key in" in trouble(folder)
        assert "install -d -m 0700" in trouble(folder / "missing")
        assert "is not a folder" in trouble(write(folder, "default"))


class TestNames:
    @pytest.mark.parametrize(
        ("tenant", "name"),
        [
            ("research", "research"),
            ("uid:1001", "uid:1001"),
            ("a/b", "a%2Fb"),
            ("50%", "50%25"),
            ("..", "%2E."),
            ("default", "%64efault"),
            ("größe", "größe"),
        ],
    )
    def test_every_tenant_has_a_name_of_its_own(self, tenant: str, name: str):
        assert file_of_tenant(tenant) == name
        assert tenant_of_file(Path("/keys") / name) == tenant

    @pytest.mark.parametrize("name", ["50%", "%2", "%zz", "%ff"])
    def test_a_name_that_stands_for_nobody(self, folder: Path, name: str):
        write(folder, name)
        assert "stands for no tenant" in trouble(folder)

    def test_two_files_of_one_tenant(self, folder: Path):
        write(folder, "a")
        write(folder, "%61")
        assert "cannot be told apart" in trouble(folder)


class TestTable:
    def table(self, **own: bytes) -> KeyTable:
        checks = {tag_of(name): check.ljust(CHECK_BYTES) for name, check in own.items()}
        return KeyTable(b"s" * SLAB_ID_BYTES, b"d" * CHECK_BYTES, checks)

    def test_what_was_packed_is_found(self):
        for table in (self.table(), self.table(a=b"1", b=b"2"), KeyTable(b"s" * SLAB_ID_BYTES, None, {})):
            pages = table.pack()
            assert len(pages) % 4096 == 0
            assert unpack(pages) == table
            assert unpack(pages + bytes(4096)) == table

    def test_the_largest_fits_before_the_first_extent(self):
        own = {TenantTag(tag): bytes(CHECK_BYTES) for tag in range(KEYS_MAX)}
        pages = KeyTable(b"s" * SLAB_ID_BYTES, None, own).pack()
        assert OFFSET + len(pages) <= 2 << 20
        assert unpack(pages) == KeyTable(b"s" * SLAB_ID_BYTES, None, own)

    def test_a_flipped_bit_anywhere_is_noticed(self):
        pages = self.table(a=b"1").pack()
        for at in range(76):
            damaged = bytearray(pages)
            damaged[at] ^= 1
            assert unpack(bytes(damaged)) is None, at
        assert unpack(b"") is None
        assert unpack(bytes(4096)) is None

    def test_whether_any_key_is_left(self):
        assert self.table().shares_a_key(self.table(a=b"1"))
        one = KeyTable(b"s", None, {tag_of("a"): b"1"})
        assert one.shares_a_key(KeyTable(b"s", b"2", {tag_of("a"): b"1"}))
        assert not one.shares_a_key(KeyTable(b"s", b"2", {tag_of("b"): b"1"}))
        assert not KeyTable(b"s", None, {}).shares_a_key(KeyTable(b"s", None, {}))
        moved = KeyTable(b"s", b"1", {})
        assert one.shares_a_key(moved), "the tenant's key is everybody's now"


def test_a_set_without_keys_may_write_nothing():
    assert KeySet(None, {}).writable == frozenset()
