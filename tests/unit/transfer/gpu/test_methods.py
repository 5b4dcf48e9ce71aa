"""Which way of copying a GPU's worker chooses for small fragments."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from kvtier_kernels import DevicePlan
from kvtierd.workers.copy.gpu.copying import BySize
from kvtierd.workers.copy.gpu.device import descriptors_of
from kvtierd.workers.copy.gpu.methods import TABLE, MeasuredMethod, measured_methods

from tests.support.fake_cuda import FakeCuda

KIB = 1 << 10
PRODUCT = "NVIDIA Example"
SMALL = [{"most_bytes": 8 * KIB, "method": "rows"}, {"most_bytes": 16 * KIB, "method": "loop"}]


class Way:
    """Notes what it was given."""

    def __init__(self, how: str) -> None:
        self.how, self.plans = how, 0

    def submit(self, *arguments: object) -> None:
        self.plans += 1


def written(folder: Path, content: object) -> Path:
    file = folder / "methods.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_the_table_names_a_method_up_to_each_size(tmp_path: Path) -> None:
    table = written(tmp_path, {"format": 1, "products": {PRODUCT: {"to_device": SMALL}}})
    found = measured_methods(PRODUCT, to_device=True, table=table)
    assert found == (MeasuredMethod(8 * KIB, "rows"), MeasuredMethod(16 * KIB, "loop"))
    assert measured_methods(PRODUCT, to_device=False, table=table) == ()
    assert measured_methods("another", to_device=True, table=table) == ()


def test_the_table_of_the_package_is_one() -> None:
    for product in json.loads(TABLE.read_text())["products"]:
        for to_device in (True, False):
            measured_methods(product, to_device=to_device)


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        {},
        {"format": 2, "products": {}},
        {"format": 1, "products": {PRODUCT: {"to_device": [{"most_bytes": 1}]}}},
        {"format": 1, "products": {PRODUCT: {"to_device": [{"most_bytes": 1, "method": "magic"}]}}},
        {"format": 1, "products": {PRODUCT: {"to_device": SMALL[::-1]}}},
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, content: object) -> None:
    table = written(tmp_path, content)
    with pytest.raises(ValueError, match=r"methods\.json"):
        measured_methods(PRODUCT, to_device=True, table=table)


def test_blocks_go_the_way_of_their_fragments_size() -> None:
    rows, loop, batches = Way("rows"), Way("loop"), Way("batches")
    chosen = BySize([(8 * KIB, rows), (16 * KIB, loop)], batches)
    for fragment_bytes in (4 * KIB, 8 * KIB, 12 * KIB, 64 * KIB):
        sizes = np.full(2, fragment_bytes, np.uint64)
        plan = DevicePlan(np.array([1 << 40, 1 << 41], np.uint64), sizes, sizes, 4)
        chosen.submit(plan, np.zeros(1, np.uint32), cast(Any, np.ones(1, np.uint32)))
    assert [way.plans for way in (rows, loop, batches)] == [2, 1, 1]
    assert chosen.how == "batches; fragments up to 8 KiB by rows; fragments up to 16 KiB by loop"


@pytest.mark.fake_gpu
def test_only_auto_heeds_what_was_measured(make_fake_cuda: Callable[..., FakeCuda]) -> None:
    driver, small = make_fake_cuda().driver(), (MeasuredMethod(8 * KIB, "rows"),)

    def how(method: str) -> str:
        return descriptors_of(driver, method, cast(Any, None), 1, to_device=True, small=small).how

    assert "fragments up to 8 KiB by two-dimensional copies" in how("auto")
    assert not any("fragments up to" in how(method) for method in ("batch", "loop", "rows"))
