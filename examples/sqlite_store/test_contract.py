"""The driver keeps every promise that kvtier relies on: `pytest test_contract.py`."""

from pathlib import Path

import pytest
from kvtier_sqlite import open_store
from kvtierd.tiers.store import contract
from kvtierd.tiers.store.objects import StoreError


@pytest.mark.parametrize("check", contract.CHECKS, ids=contract.title)
def test_it_keeps_the_contract(check: contract.Check, tmp_path: Path) -> None:
    contract.run(check, open_store, f"sqlite://{tmp_path}/blocks.db")


@pytest.mark.parametrize("url", ["sqlite://host/blocks.db", "sqlite://"])
def test_a_url_without_a_path_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="sqlite:///FILE"):
        open_store(url, {}, 1.0)


@pytest.mark.parametrize("options", [{"threads": "0"}, {"threads": "many"}, {"colour": "blue"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(StoreError, match="threads=NUMBER"):
        open_store("sqlite:///blocks.db", options, 1.0)
