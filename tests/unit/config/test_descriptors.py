"""What clients may take of the daemon's open files leaves enough for the daemon, whatever the limit is."""

import dataclasses
import math

import pytest
from kvtierd.config.daemon import Config
from kvtierd.config.descriptors import (
    IN_TRANSIT,
    OF_OUR_OWN,
    PAGES,
    RESERVE,
    DescriptorShares,
    descriptors_wanted,
    shares_within,
)


def config(sessions_max: int = 256) -> Config:
    found = Config()
    return dataclasses.replace(found, server=dataclasses.replace(found.server, sessions_max=sessions_max))


def taken(shares: DescriptorShares) -> int:
    """A session has a side connection and a pidfd, and what is in transit may be copied for a worker."""
    return 2 * shares.sessions + shares.connections + shares.pages + 2 * shares.in_transit


@pytest.mark.parametrize("sessions_max", [1, 4, 256, 65_536])
def test_with_as_many_as_are_wanted_everything_is_allowed(sessions_max: int) -> None:
    wanted = descriptors_wanted(config(sessions_max))
    for limit in (wanted, wanted + 1, math.inf):
        shares = shares_within(config(sessions_max), limit)
        assert shares.sessions == sessions_max
        assert (shares.pages, shares.in_transit) == (PAGES, IN_TRANSIT)


@pytest.mark.parametrize("limit", [0, 100, 320, 512, 1_024, 2_000, 3_000])
def test_with_fewer_everybody_gets_less_and_the_daemon_has_enough(limit: int) -> None:
    shares = shares_within(config(), limit)
    assert 4 <= shares.sessions < 256
    assert 4 <= shares.pages < PAGES
    assert 64 <= shares.in_transit < IN_TRANSIT
    if limit >= 512:
        assert taken(shares) <= limit - RESERVE - OF_OUR_OWN // 2
