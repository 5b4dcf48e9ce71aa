"""Daemons that publish KV events, and clients whose blocks they tell of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.stores.conftest import connect_to as connect_to
from tests.integration.stores.conftest import new_host as new_host
from tests.integration.stores.conftest import unhurried as unhurried
from tests.support.events import EventPlace, event_place


@pytest.fixture
def place() -> Iterator[EventPlace]:
    """Where a daemon publishes."""
    with event_place() as made:
        yield made
