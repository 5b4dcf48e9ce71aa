"""Whether the store that hosts share can be used: its driver, and where its secrets are. The store itself is
not asked, because a daemon serves without it."""

from collections.abc import Iterator

from kvtierd.config.store import is_secret
from kvtierd.preflight.asking import ask_module
from kvtierd.preflight.findings import Finding, Situation, Verdict
from kvtierd.tiers.store import coding

IMPORT_S = 20.0
"""So long an import of a driver is waited for."""
MEND = "install what it lacks where the daemon is, or leave the setting empty"


def check_store(situation: Situation) -> Iterator[Finding]:
    """Checks that the driver of a store that is configured can be imported, in a process of its own, because
    it may be anybody's code; and where the store's secrets are."""
    store = situation.config.store
    if not store.url:
        return
    yield from _compression(store.compression)
    facts = ask_module("kvtierd.tiers.store", store.url, timeout_s=IMPORT_S)
    if facts is None:
        found = f"its driver could not be imported within {IMPORT_S:.0f} s"
        yield Finding("store", Verdict.WARNING, found, MEND, "store.url", store.url)
        return
    if "error" in facts:
        yield Finding("store", Verdict.FAILURE, facts["error"], MEND, "store.url", store.url)
        return
    secret = [name for name, _ in store.options if is_secret(name)]
    if secret:
        yield Finding(
            "store",
            Verdict.WARNING,
            f"{', '.join(secret)} in the configuration can be read by whoever may read that",
            "use the daemon's environment (AWS_SECRET_ACCESS_KEY, for example), or the machine's role",
            "store.options",
            ", ".join(secret),
        )
    else:
        yield Finding("store", Verdict.OK, f"{store.url}, by {facts['package']}")


def _compression(method: str) -> Iterator[Finding]:
    """Whether blocks can be compressed, if they are to be; and whether those can be read that are."""
    if coding.has_library():
        return
    install = f"install it where the daemon is ({coding.INSTALL})"
    field = "store.compression"
    if method != coding.Compression.OFF.value:
        found = f"blocks cannot be compressed without {coding.LIBRARY}"
        yield Finding("store", Verdict.FAILURE, found, f"{install}, or leave the setting off", field, method)
    else:
        found = f"without {coding.LIBRARY}, blocks that other hosts have compressed are misses"
        yield Finding("store", Verdict.WARNING, found, install, field, method)
