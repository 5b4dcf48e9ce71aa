"""The settings of a store that hosts share."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtierd.config import daemon as config
from kvtierd.config.daemon import Config
from kvtierd.config.settings import ConfigError
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.stimuli import WriteMode
from kvtierd.service import opening
from kvtierd.workers.supervisor.kinds import DiskOptions, StoreOptions

from tests.support.drivers import declare


@pytest.fixture(autouse=True)
def no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "no-such.toml")


def load(file: Path | None = None, **flags: object) -> Config:
    return config.load(file, {f"store.{name}": value for name, value in flags.items()}, {}).config


def test_there_is_none_unless_it_is_named() -> None:
    assert load().store.url == ""


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://b/f", "az://c", "file:///mnt/shared"]
)
def test_these_are_stores(url: str) -> None:
    assert load(url=url).store.url == url
    assert load(url=f"{url}/").store.url == url


@pytest.mark.parametrize("url", ["bucket", "s3:bucket", "s3://", "ftp://host/x", "/mnt/shared"])
def test_these_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        load(url=url)


def test_a_scheme_of_another_package_is_one_if_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(url="mine://x")
    assert "store.url = 'mine://x'" in str(raised.value)
    assert "abfss, az, file, gs, https, mooncake, s3" in str(raised.value)
    assert "install a package that declares 'mine'" in str(raised.value)
    declare(tmp_path, "my-package", {"mine": "a_module_that_is_not_there:open_store"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load(url="mine://x").store.url == "mine://x"


def test_options_are_text_or_a_table(tmp_path: Path) -> None:
    wanted = (("endpoint", "http://127.0.0.1:9000"), ("region", "eu-1"))
    text = "region=eu-1, endpoint=http://127.0.0.1:9000"
    assert load(url="s3://b", options=text).store.options == wanted
    file = tmp_path / "kvtierd.toml"
    file.write_text(
        '[store]\nurl = "s3://b"\n[store.options]\nregion = "eu-1"\nendpoint = "http://127.0.0.1:9000"\n'
    )
    assert load(file).store.options == wanted
    assert load(url="s3://b").store.options == ()
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        load(url="s3://b", options="region")


def test_tenants_opt_in_by_name() -> None:
    assert load(url="s3://b").store.to_core().tenants is None
    store = load(url="s3://b", tenants="research, uid:1000").store
    assert store.tenants == ("research", "uid:1000")
    core = store.to_core()
    assert [core.may_write(tag_of(name)) for name in ("research", "uid:1000", "uid:1001")] == [
        True,
        True,
        False,
    ]
    with pytest.raises(ConfigError, match="write the tenant alone"):
        load(url="s3://b", tenants="*=research")


def test_there_may_be_disks_as_well() -> None:
    read = config.load(None, {"store.url": "s3://b", "disk.paths": "/a", "disk.size": "1GiB"}, {}).config
    images = list(opening.open_images(read))
    try:
        [disk, store] = [opening.below(read, number, image, 0) for number, image in enumerate(images)]
        assert isinstance(disk, DiskOptions)
        assert isinstance(store, StoreOptions)
        assert (disk.number, str(disk.path)) == (0, "/a")
        assert (store.number, store.url) == (1, "s3://b")
    finally:
        for image in images:
            image.close()


def test_sizes_have_to_be_possible() -> None:
    for name in ("write_queue_size", "read_queue_size"):
        with pytest.raises(ConfigError, match=rf"store\.{name}"):
            load(None, url="s3://b", **{name: "1KiB"})
    with pytest.raises(ConfigError, match=r"store\.size"):
        load(url="s3://b", size="1MiB")
    with pytest.raises(ConfigError, match=r"store\.size"):
        load(url="s3://b", size="64TiB")


def test_what_the_core_is_told() -> None:
    core = load(url="s3://b", write_mode="through", deadline_s=3, errors_max=5).store.to_core()
    assert (core.mode, core.slow_deadline_s, core.errors_max) == (WriteMode.THROUGH, 6.0, 5)
    assert load(url="s3://b").store.to_core().mode is WriteMode.ON_REUSE
