"""Counts of what each tenant does, so that operators can see who uses the cache."""

import copy
from collections.abc import Iterator

from kvtierd.core.ids import TenantTag
from kvtierd.core.status import TenantTally

TENANTS_COUNTED_MAX = 1_024
"""A user of the host may be many users, by way of user namespaces, so their number has a bound. Tenants that
come later are not counted."""
_NOTHING = TenantTally()


class TenantTallies:
    """The tallies of all tenants that were seen since the start, and their names as far as they are known."""

    def __init__(self) -> None:
        self._by_tag: dict[TenantTag, TenantTally] = {}
        self._names: dict[TenantTag, str] = {}
        self._of_others = TenantTally()
        """Tenants that are not counted have this one together. Nobody reads it."""

    def of(self, tenant: TenantTag) -> TenantTally:
        """The tally of a tenant, which begins with zeros. It stays the same object."""
        tally = self._by_tag.get(tenant)
        if tally is None:
            if len(self._by_tag) >= TENANTS_COUNTED_MAX:
                return self._of_others
            tally = self._by_tag[tenant] = TenantTally()
        return tally

    def copy_of(self, tenant: TenantTag) -> TenantTally:
        """What was counted for a tenant; zeros if it is not counted."""
        return copy.copy(self._by_tag.get(tenant, _NOTHING))

    def name(self, tenant: TenantTag, name: str) -> TenantTally:
        """Remembers what a tenant is called. Returns its tally."""
        tally = self.of(tenant)
        if tenant in self._by_tag:
            self._names.setdefault(tenant, name)
        return tally

    def name_of(self, tenant: TenantTag) -> str:
        """What a tenant is called; empty if that is not known."""
        return self._names.get(tenant, "")

    def __iter__(self) -> Iterator[TenantTag]:
        """The tenants that are counted, in the order in which they came."""
        return iter(self._by_tag)
