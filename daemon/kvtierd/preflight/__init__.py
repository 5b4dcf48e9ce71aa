"""What has to hold before a daemon starts: one list of checks, for `kvtierd serve` and `kvtierctl doctor`.

The checks make and change nothing. `serve` refuses with all failures at once and logs the warnings, and
`doctor` shows everything, and asks one thing more. A check has the same verdict for both.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from kvtierd.config.daemon import Loaded
from kvtierd.logs import logger
from kvtierd.preflight.disks import check_disks
from kvtierd.preflight.encryption import check_keys
from kvtierd.preflight.events import check_events
from kvtierd.preflight.findings import Finding, NotReadyError, Situation, Verdict
from kvtierd.preflight.host import (
    check_compute_modes,
    check_gpus,
    check_kernel,
    check_limits,
    check_numa,
)
from kvtierd.preflight.listening import check_ports, check_sockets, daemon_at
from kvtierd.preflight.pool import check_pool
from kvtierd.preflight.remote import check_remote
from kvtierd.preflight.store import check_store

__all__ = ["OF_DOCTOR", "Finding", "NotReadyError", "Verdict", "examine", "require"]

Check = Callable[[Situation], Iterator[Finding]]

CHECKS: Sequence[Check] = (
    check_kernel,
    check_sockets,
    check_pool,
    check_disks,
    check_keys,
    check_store,
    check_ports,
    check_events,
    check_remote,
    check_limits,
    check_gpus,
    check_numa,
)
OF_DOCTOR: Sequence[Check] = (*CHECKS, check_compute_modes)
"""`doctor` also asks what initialises GPUs' driver, for which a start does not wait: a worker that is not let
in says the same."""
OF_HOLDERS: Sequence[Check] = (check_pool, check_ports, check_events)
"""The checks that are repeated while the pool's previous owner ends."""
POLL_S = 0.1
log = logger(__name__)


def examine(loaded: Loaded, *, may_run: bool, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Runs the checks, and changes nothing. With `may_run`, what the daemon at the configured socket uses is
    no obstacle. Takes seconds, and no longer, where a disk does not answer."""
    situation = Situation(loaded, daemon_at(loaded.config.server.socket_path), may_run)
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(situation)
        except OSError as error:
            name = check.__name__.removeprefix("check_")
            why = f"it cannot be looked at: {error}"
            found.append(Finding(name, Verdict.WARNING, why, "look at it as the daemon's user"))
    return found


def require(loaded: Loaded) -> None:
    """Returns if a daemon can start with this configuration, and logs warnings.

    If only the pool's previous owner is in the way, waits until it has ended, at most pool.lock_timeout_s.
    Raises NotReadyError.
    """
    deadline_s = time.monotonic() + loaded.config.pool.lock_timeout_s
    findings = examine(loaded, may_run=False)
    while failures := [each for each in findings if each.verdict is Verdict.FAILURE]:
        locked = any(each.name == "pool file" and each.holder for each in failures)
        only_holder = locked and all(each.holder for each in failures)
        if not only_holder or time.monotonic() >= deadline_s:
            raise NotReadyError(failures, loaded.given)
        time.sleep(POLL_S)
        again = examine(loaded, may_run=False, checks=OF_HOLDERS)
        renewed = {each.name for each in (*failures, *again)}
        findings = [*(each for each in findings if each.name not in renewed), *again]
    for each in findings:
        if each.verdict is Verdict.WARNING:
            about = {each.field: str(each.value)} if each.field else {}
            log.warning(f"{each.name}: {each.found}", remedy=each.remedy, **about)
