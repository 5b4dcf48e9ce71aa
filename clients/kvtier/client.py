"""The blocking client."""

from collections.abc import Callable
from typing import Self

from kvtier.base import ClientBase
from kvtier.calls import LookupCallBase, TransferBase, Waiting, wait_blocking
from kvtier.lookups import Lookup
from kvtier.transfers import Outcome


class LookupCall(LookupCallBase):
    """A lookup on its way."""

    def wait(self, timeout_s: float) -> Lookup:
        """The answer, or a miss if it has not come in time; then the lookup is abandoned (see `abandon`)."""
        return wait_blocking(self._wait(timeout_s)) or self.abandon()

    def wait_for_answer(self, timeout_s: float) -> Lookup | None:
        """The answer, or None if it has not come in time; the lookup stays on its way."""
        return wait_blocking(self._wait(timeout_s))


class Transfer(TransferBase):
    """A submitted store or load."""

    def wait(self, timeout_s: float) -> Outcome:
        """Waits until the outcome is known, at most `timeout_s`; returns how it stands then.

        Never says that it is over while a copy may still land: `outcome.fenced` is False then. Ask again, or
        `revoke`.
        """
        return wait_blocking(self._wait(timeout_s))


class Client(ClientBase[LookupCall, Transfer, Lookup, bool]):
    """A blocking client of kvtierd. Every method may be called from any thread.

    It connects in the background from the moment it is made, and again whenever the daemon went away. Close
    it, or use it as a context manager.
    """

    _call_type = LookupCall
    _transfer_type = Transfer

    def _wait(self, waiting: Waiting[bool]) -> bool:
        return wait_blocking(waiting)

    def _answer(self, start: Callable[[], LookupCall], timeout_s: float) -> Lookup:
        return start().wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
