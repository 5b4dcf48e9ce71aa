"""What happens on one rank of an engine and not on the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import Engine, with_linker
from tests.support.daemon import DaemonHost, until

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(900)]
FIRST_MEDIA = 900
PAGE = 8
TEXT = [(7 * i * i + 11 * i) % FIRST_MEDIA for i in range(600)]
WITH_MEDIA = [*TEXT[:100], *range(FIRST_MEDIA, FIRST_MEDIA + 50), *TEXT[100:]]


def test_an_engine_serves_on_if_kvtier_does_not_start_on_one_rank(
    host: DaemonHost, model: Path, tmp_path: Path
) -> None:
    """Ranks wait for each other in every lookup, so all of them have to look for the same pages, also those
    of a rank without kvtier, and also for a request that has something in it after which nothing is looked
    for. What the other rank has stored is loaded by nobody, because every rank needs its part."""
    whole = (len(TEXT) - 1) // PAGE * PAGE
    with Engine(
        model,
        tmp_path / "engine.log",
        injected={"failing_rank": 1, "first_media": FIRST_MEDIA},
        tp_size=2,
        page_size=PAGE,
        **with_linker(host.socket),
    ) as engine:
        assert engine.log.count("kvtier is off for this engine") == 1
        assert engine.log.count("pages of 8 tokens are small") == 1
        cold, local = engine.generate(TEXT), engine.generate(TEXT)
        assert (cold.reason, cold.restored, local.computed_before) == ("length", 0, whole)
        until(lambda: host.status().blocks.ready >= whole // PAGE, "the other rank has stored its part")
        assert engine.flush()
        again = engine.generate(TEXT)
        assert (again.computed_before, again.restored) == (0, 0)
        assert again.tokens == cold.tokens
        assert engine.generate(WITH_MEDIA).reason == "length"
        assert engine.generate([1, *WITH_MEDIA]).reason == "length"
        assert engine.flush()
