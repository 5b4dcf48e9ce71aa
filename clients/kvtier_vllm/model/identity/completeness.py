"""Tables of classed settings. Nothing here knows which engine they are of."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_vllm.model.identity.reasons import Classification

Table = Mapping[Classification, str]
"""Names, separated by blanks, for each reason why they are classed as they are."""


def classed(table: Table) -> dict[str, Classification]:
    """Returns each name of a table with its reason. Raises ValueError for a name that is classed twice."""
    found: dict[str, Classification] = {}
    for reason, names in table.items():
        for name in names.split():
            if name in found:
                raise ValueError(f"{name} is classed twice")
            found[name] = reason
    return found
