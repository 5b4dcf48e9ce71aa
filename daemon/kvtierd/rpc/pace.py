"""Shares out the event loop between tenants.

A call is handled at once and whole, and everybody else waits for it. When several tenants are connected and
the loop is full, those that use more than an even part of it are heavy: from then on all heavy tenants
together have a fifth of the loop, until they want less. The calls of all others are never held up.

What a call counts for is more than the time in which it is handled: gRPC needs the loop as well, to receive
and to answer it, and a long call makes others wait for all of it. Engines do not come near: their calls take
a few per cent of the loop together.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PART = 0.2
"""The part of the loop that heavy tenants share. The rest keeps the waits of all others short."""
FULL = 0.6
"""The loop is full when calls of tenants that are not heavy count for so much of the time."""
ALLOWED_S = 0.02
"""How far a tenant may be ahead of its part of the loop without waiting: a step's lookups and stores all
come at once."""
MESSAGE_S = 0.00015
"""What gRPC needs the loop for, for each call."""
BRIEF_S = 0.0004
"""Calls up to so long count as they are; a lookup of 8,192 hashes takes less."""
LONG_COUNTS = 4.0
"""How often the time of a call beyond that counts. With 4, a heavy tenant that looks up 65,536 hashes at a
time gets 6 % of the loop."""
COUNT_EVERY_S = 0.05
"""Time between two looks at what all tenants use."""
ACTIVE = 0.02
"""A tenant that uses less of the loop is not counted among those that want an even part."""
TENANTS_MAX = 4_096
WAIT_S_MIN, WAIT_S_MAX = 0.001, 1.0
"""A call waits no longer, whatever its tenant has used: a session must not end as silent because of it."""


@dataclass(slots=True)
class _Account:
    debt_s: float = 0.0
    """How far the tenant was ahead of its part of the loop at `at_s`."""
    at_s: float = 0.0
    heavy: bool = False
    """Whether it has been ahead by more than is allowed, and has not paid back all of it since."""
    used_s: float = 0.0
    """What its calls have counted for since the last look."""
    waiting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of one tenant wait one behind the other."""


class LoopPace:
    """The accounts of all tenants. For use on the event loop only."""

    def __init__(
        self,
        tenants: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        part: float = PART,
        light_max: float = 1.0,
    ) -> None:
        """`tenants()` is how many tenants are connected now; a single one never waits. `part` of the loop is
        what heavy ones share, and one that uses more than `light_max` of it is heavy in any case."""
        self._tenants = tenants
        self._part = part
        self._light_max = light_max
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._looked_s = clock()
        self._heavy_share = part
        """The part of each heavy tenant, as of the last look."""
        self._light_share = light_max
        """What any other tenant may use without becoming heavy, as of the last look."""

    async def wait(self, tenant: str) -> None:
        """Returns when the tenant may make another call: at once, unless it is heavy and ahead of its
        part."""
        if tenant not in self._accounts or self._over_s(tenant) <= 0:
            return
        async with self._accounts[tenant].waiting:
            until_s = self._clock() + WAIT_S_MAX
            # There is no event to wait for: the debt falls as time goes by.
            while (over_s := self._over_s(tenant)) > 0 and self._clock() < until_s:
                pause_s = max(over_s / self._heavy_share, WAIT_S_MIN)
                await asyncio.sleep(min(pause_s, until_s - self._clock()))

    def spent(self, tenant: str, seconds: float) -> None:
        """A call of the tenant has kept the loop for so long. Give processor time of the loop's thread: while
        another process has the processor, the tenant uses nothing."""
        if self._tenants() < 2:
            return
        if tenant not in self._accounts and len(self._accounts) >= TENANTS_MAX:
            self._forget_even()
        account = self._accounts.setdefault(tenant, _Account(at_s=self._clock()))
        self._settle(account)
        brief_s = min(seconds, BRIEF_S)
        counted_s = MESSAGE_S + brief_s + LONG_COUNTS * (seconds - brief_s)
        account.used_s += counted_s
        account.debt_s += counted_s
        account.heavy = account.heavy or account.debt_s > ALLOWED_S

    def _over_s(self, tenant: str) -> float:
        if self._tenants() < 2:
            return 0.0
        account = self._accounts[tenant]
        self._settle(account)
        return account.debt_s - ALLOWED_S

    def _settle(self, account: _Account) -> None:
        self._look()
        now_s = self._clock()
        rate = self._heavy_share if account.heavy else self._light_share
        account.debt_s = max(0.0, account.debt_s - (now_s - account.at_s) * rate)
        account.at_s = now_s
        account.heavy = account.heavy and account.debt_s > 0

    def _look(self) -> None:
        """Sets the shares by what all tenants have used since the last look."""
        now_s = self._clock()
        since_s = now_s - self._looked_s
        if since_s < COUNT_EVERY_S:
            return
        self._looked_s = now_s
        heavy = light = 0
        used_s = 0.0
        for account in self._accounts.values():
            if account.heavy:
                heavy += account.debt_s > (now_s - account.at_s) * self._heavy_share
            else:
                light += account.used_s > ACTIVE * since_s
                used_s += account.used_s
            account.used_s = 0.0
        self._heavy_share = self._part / max(1, heavy)
        even = 1 / max(1, light) if used_s > FULL * since_s else 1.0
        self._light_share = min(self._light_max, even)

    def _forget_even(self) -> None:
        for tenant, account in list(self._accounts.items()):
            self._settle(account)
            if not account.debt_s and not account.waiting.locked():
                del self._accounts[tenant]
