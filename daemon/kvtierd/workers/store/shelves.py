"""The packs of all groups of all namespaces that this worker has to do with."""

from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.objects import ObjectStore
from kvtierd.tiers.store.packed import Shelf


class Shelves:
    def __init__(self, store: ObjectStore, prefix: str, host: str, coder: Coder) -> None:
        """As for `Shelf`."""
        self._store = store
        self._prefix = prefix
        self._host = host
        self._coder = coder
        self._shelves: dict[tuple[bytes, int], Shelf] = {}

    def of(self, namespace: bytes, group: int) -> Shelf:
        """The shelf of a group, made if there is none. It stays, because slots may refer to its packs."""
        shelf = self._shelves.get((namespace, group))
        if shelf is None:
            shelf = Shelf(self._store, self._prefix, namespace, group, self._host, coder=self._coder)
            self._shelves[namespace, group] = shelf
        return shelf
