"""Whether the store that hosts share can be used: the library for it, and where its secrets are. The store
itself is not asked, because a daemon serves without it."""

from collections.abc import Iterator
from importlib.util import find_spec

from kvtierd.preflight.findings import Finding, Situation, Verdict

LIBRARY = "obstore"
INSTALL = "install it where the daemon is (pip install 'obstore>=0.12,<0.13'), or leave the setting empty"
SECRETS = ("secret", "token", "password", "key")


def check_store(situation: Situation) -> Iterator[Finding]:
    """Checks that a store that is configured has its library, and where its secrets are."""
    store = situation.config.store
    if not store.url:
        return
    if find_spec(LIBRARY) is None:
        found = f"stores cannot be reached without the library {LIBRARY}"
        yield Finding("store", Verdict.FAILURE, found, INSTALL, "store.url", store.url)
        return
    secret = [name for name, _ in store.options if any(part in name for part in SECRETS)]
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
        yield Finding("store", Verdict.OK, f"{store.url}, by {LIBRARY}")
