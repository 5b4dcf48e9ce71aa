"""The blocking client."""

from collections.abc import Callable
from typing import Self

from kvtier.base import ClientBase
from kvtier.calls import LookupCallBase, TransferBase, Waiting, wait_blocking
from kvtier.lookups import Lookup
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


class Client(ClientBase[LookupCall, Transfer, Lookup, bool]):
    """A blocking client of kvtierd. Every method may be called from any thread.

    It connects in the background from the moment it is made, and again each time that the daemon has gone
    away. Close it, or use it as a context manager.
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
