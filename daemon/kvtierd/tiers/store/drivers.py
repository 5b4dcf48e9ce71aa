"""Which package has the driver of a store: the entry points of the group `kvtier.stores`, by the scheme of
the store's URL. The drivers that kvtier has itself are declared in the same way.

Only `open_driver` and `load_driver` import a driver, and only the store's worker and the check before a start
call them, the latter in a process of its own. For everything else what packages declare is enough.
"""

import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final, cast

from kvtierd.core.errors import Reason, Refusal
from kvtierd.tiers.store.objects import ObjectStore, OpenStore, StoreError

GROUP: Final = "kvtier.stores"
FIELD: Final = "store.url"
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")


def schemes() -> list[str]:
    """The schemes of all stores that an installed package has a driver for."""
    return sorted({entry.name for entry in entry_points(group=GROUP) if _SCHEME.fullmatch(entry.name)})


def find_driver(url: str) -> EntryPoint:
    """The driver for a URL, which is not imported. Raises Refusal if there is none, or more than one."""
    scheme = url.partition("://")[0]
    found = list(entry_points(group=GROUP, name=scheme)) if _SCHEME.fullmatch(scheme) else []
    if not found:
        raise _refusal(
            Reason.MODE_UNSUPPORTED,
            url,
            f"no installed package has a driver for {scheme}://; there are drivers for "
            f"{', '.join(schemes()) or 'nothing'}: write one of these, or install a package that declares "
            f"{scheme!r} in the entry points {GROUP!r} where the daemon is installed",
        )
    if len(found) > 1:
        packages = " and ".join(sorted(package_of(entry) for entry in found))
        raise _refusal(
            Reason.MODE_UNSUPPORTED,
            url,
            f"several packages have a driver for {scheme}://, namely {packages}: uninstall all but one",
        )
    return found[0]


def package_of(entry: EntryPoint) -> str:
    """The name and version of the package that declares a driver."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def load_driver(url: str) -> OpenStore:
    """Imports the driver for a URL. Raises Refusal, which names its package, if that fails."""
    entry = find_driver(url)
    try:
        driver = entry.load()
    except (Exception, SystemExit) as error:  # code that anybody may have written
        said = f"{type(error).__name__}: {error}"
        message = f"the driver {entry.value} of {package_of(entry)} cannot be imported: {said}"
        raise _refusal(Reason.MODE_UNSUPPORTED, url, message) from error
    if not callable(driver):
        message = f"{entry.value} of {package_of(entry)} is no function that opens a store"
        raise _refusal(Reason.MODE_UNSUPPORTED, url, message)
    return cast(OpenStore, driver)


def open_driver(url: str, options: Mapping[str, str], deadline_s: float) -> ObjectStore:
    """Opens the store at a URL by its driver, which is imported for that. Raises Refusal."""
    driver = load_driver(url)
    package = package_of(find_driver(url))
    try:
        store: object = driver(url, options, deadline_s)
    except StoreError as error:
        raise _refusal(Reason.MALFORMED, url, f"it cannot be used: {error}") from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        message = f"it cannot be used: its driver, of {package}, raised {said}"
        raise _refusal(Reason.MALFORMED, url, message) from error
    if not isinstance(store, ObjectStore):
        message = (
            f"its driver, of {package}, returned {type(store).__name__}, which lacks methods of an "
            "ObjectStore: install a version of that package that fits this kvtier"
        )
        raise _refusal(Reason.MODE_UNSUPPORTED, url, message)
    return store


def _refusal(reason: Reason, url: str, message: str) -> Refusal:
    return Refusal(reason, message, field=FIELD, value=url)
