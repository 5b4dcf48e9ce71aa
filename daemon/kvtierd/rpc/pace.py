"""Shares out the event loop between tenants.

A call is handled at once and whole, so a large lookup keeps everybody waiting for tens of milliseconds. Where
several tenants are connected, those that want much of the loop share a part of it, and each waits before its
next call while it is ahead of its share. Engines do not come near that: their calls take a few per cent of
the loop together.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

ALLOWED_S = 0.005
"""How far ahead of its share a tenant may be without waiting."""
PART = 0.25
"""The part of the loop that the tenants share who want much of it. The rest is for those who want little, and
keeps their waits short."""
COUNT_EVERY_S = 0.05
"""Time between two counts of the tenants that want much."""
TENANTS_MAX = 4_096
WAIT_S_MIN = 0.001


@dataclass(slots=True)
class _Account:
    debt_s: float = 0.0
    """How far the tenant was ahead of its share at `at_s`."""
    at_s: float = 0.0
    waiting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of one tenant wait one behind the other."""


class LoopPace:
    """The accounts of all tenants. For use on the event loop only."""

    def __init__(
        self, tenants: Callable[[], int], clock: Callable[[], float] = time.monotonic, part: float = PART
    ) -> None:
        """`tenants()` is how many tenants are connected now; a single one never waits. `part` is what they
        share of the loop."""
        self._tenants = tenants
        self._part = part
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._ahead = 0
        """How many tenants were ahead of their share when they were last counted."""
        self._counted_s = -COUNT_EVERY_S

    async def wait(self, tenant: str) -> None:
        """Returns when the tenant may make another call: at once, unless it is ahead of its share."""
        if tenant not in self._accounts or self._over_s(tenant) <= 0:
            return
        async with self._accounts[tenant].waiting:
            # There is no event to wait for: the debt falls as time goes by.
            while (over_s := self._over_s(tenant)) > 0:  # noqa: ASYNC110
                await asyncio.sleep(max(over_s / self._share, WAIT_S_MIN))

    def spent(self, tenant: str, seconds: float) -> None:
        """A call of the tenant has kept the loop for so long."""
        if self._tenants() < 2:
            return
        if tenant not in self._accounts and len(self._accounts) >= TENANTS_MAX:
            self._forget_even()
        account = self._accounts.setdefault(tenant, _Account(at_s=self._clock()))
        self._settle(account)
        account.debt_s += seconds

    @property
    def _share(self) -> float:
        now_s = self._clock()
        if now_s - self._counted_s >= COUNT_EVERY_S:
            self._counted_s = now_s
            self._ahead = sum(
                account.debt_s > (now_s - account.at_s) * self._part for account in self._accounts.values()
            )
        return self._part / max(1, self._ahead)

    def _over_s(self, tenant: str) -> float:
        if self._tenants() < 2:
            return 0.0
        account = self._accounts[tenant]
        self._settle(account)
        return account.debt_s - ALLOWED_S

    def _settle(self, account: _Account) -> None:
        now_s = self._clock()
        account.debt_s = max(0.0, account.debt_s - (now_s - account.at_s) * self._share)
        account.at_s = now_s

    def _forget_even(self) -> None:
        for tenant, account in list(self._accounts.items()):
            self._settle(account)
            if not account.debt_s and not account.waiting.locked():
                del self._accounts[tenant]
