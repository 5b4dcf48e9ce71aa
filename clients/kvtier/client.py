"""The blocking client."""

from collections.abc import Sequence
from typing import Self

from kvtier.base import CLOSE_TIMEOUT_S, LOOKUP_TIMEOUT_S, ClientBase
from kvtier.calls import LookupCallBase, TransferBase, wait_blocking
from kvtier.lookups import Lookup
from kvtier.queries import GroupQuery, Hashes, LookupMode
from kvtier.transfers import Outcome


class LookupCall(LookupCallBase):
    """A lookup that was sent, and whose answer may still be on its way."""

    def wait(self, timeout_s: float) -> Lookup:
        """Returns the answer, or a miss if it has not come in `timeout_s`, and then abandons the lookup."""
        return wait_blocking(self._wait(timeout_s)) or self.abandon()

    def wait_for_answer(self, timeout_s: float) -> Lookup | None:
        """Returns the answer, or None if it has not come in `timeout_s`. The lookup is not abandoned."""
        return wait_blocking(self._wait(timeout_s))


class Transfer(TransferBase):
    """A submitted store or load."""

    def wait(self, timeout_s: float) -> Outcome:
        """Waits until the outcome is known, at most `timeout_s` seconds, and returns it as it is then.

        If `outcome.fenced` is False, a copy may still land: wait again, or `revoke`.
        """
        return wait_blocking(self._wait(timeout_s))


class Client(ClientBase[LookupCall, Transfer]):
    """A blocking client of kvtierd. Every method may be called from any thread.

    It connects in the background from the moment it is made, and again each time that the daemon has gone
    away. Close it, or use it as a context manager.
    """

    _call_type = LookupCall
    _transfer_type = Transfer

    def wait_ready(self, timeout_s: float) -> bool:
        return wait_blocking(self._ready(timeout_s))

    def lookup(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None = None,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        lease: bool = False,
        host_only: bool = False,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> Lookup:
        call = self.start_lookup(hashes, queries, group=group, mode=mode, lease=lease, host_only=host_only)
        return call.wait(timeout_s)

    def prefetch(
        self,
        hashes: Hashes,
        queries: Sequence[GroupQuery] | None = None,
        *,
        group: int = 0,
        mode: LookupMode = LookupMode.PREFIX,
        timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> Lookup:
        return self.start_prefetch(hashes, queries, group=group, mode=mode).wait(timeout_s)

    def release_memory(self, timeout_s: float) -> bool:
        return wait_blocking(self._released(timeout_s))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        return wait_blocking(self._closed(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
