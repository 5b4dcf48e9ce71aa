"""Finds the settings of an engine that nobody has classed. Nothing here knows which engine it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvtier_vllm.model.identity.completeness import Table, classed


def unclassed(groups: Mapping[str, Iterable[str]], tables: Mapping[str, Table], where: str) -> Iterator[str]:
    """Yields a sentence for each setting that is in none of the tables. `groups` are an engine's settings, by
    the name of the table in which they should be; `where` is the file with the tables."""
    for group, names in groups.items():
        known = classed(tables.get(group, {}))
        for name in names:
            if name not in known:
                yield (
                    f"{group}.{name} is classed nowhere: find out whether it can change a value of the KV "
                    f"cache, and put it into {where} with the reason that fits (when in doubt, IDENTITY: "
                    "too narrow a namespace costs hits, too wide a one serves wrong bytes)"
                )
