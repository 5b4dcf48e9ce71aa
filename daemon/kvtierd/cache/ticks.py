"""What happens as time goes by: a tick for the core, and now and then a look at quarantined slots."""

import asyncio
from collections.abc import Callable

from kvtierd.cache.facade import Cache
from kvtierd.core.stimuli import SlotsProven, Tick
from kvtierd.logs import logger
from kvtierd.memory.host_pool import HostPool

TICK_S = 0.1
IDLE_TICK_S = 0.5
"""Between two ticks while the core is idle. What comes meanwhile has deadlines of seconds, and the daemon's
clock has to be read every second."""
QUARANTINE_RETRY_S = 5.0

log = logger(__name__)


async def run_ticks(
    cache: Cache, pool: HostPool, observe_lag: Callable[[float], None] = lambda _: None
) -> None:
    """Ticks until it is cancelled, or the daemon is poisoned. `observe_lag` is called with every tick,
    with the number of seconds by which the event loop was late."""
    loop = asyncio.get_running_loop()
    retry_at_s = loop.time() + QUARANTINE_RETRY_S
    while not cache.poisoned.is_set():
        pause_s = IDLE_TICK_S if cache.is_idle else TICK_S
        due_s = loop.time() + pause_s
        await asyncio.sleep(pause_s)
        observe_lag(max(0.0, loop.time() - due_s))
        cache.post(Tick())
        if loop.time() >= retry_at_s:
            retry_at_s = loop.time() + QUARANTINE_RETRY_S
            _retry_quarantine(cache, pool)


def _retry_quarantine(cache: Cache, pool: HostPool) -> None:
    try:
        proven = pool.retry_quarantine()
    except OSError as error:  # for example no descriptor is left to read /proc; the next try may work
        log.warning("whether writers of quarantined slots are gone cannot be told", error=str(error))
        return
    if len(proven):
        log.info("writers of quarantined slots are gone", slots=len(proven))
        cache.post(SlotsProven(proven))
