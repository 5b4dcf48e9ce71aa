"""Index pages of this host: made when a client first asks, gone when nobody uses their space any more."""

from collections.abc import Callable

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SessionId, SpaceId
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import PublishPage
from kvtierd.memory import SharedPage


class SharedPages:
    """On the event loop only."""

    def __init__(self, machine: Machine, publish: Callable[[PublishPage], object], boot_nonce: int) -> None:
        self._machine = machine
        self._publish = publish
        self._boot_nonce = boot_nonce
        self._pages: dict[SpaceId, SharedPage] = {}

    def open(self, session: SessionId, group: int) -> int:
        """A descriptor, for the caller to close, of the page of one group of the instance for which a session
        schedules. Refusal ROLE, INSTANCE_INCOMPLETE, UNKNOWN_GROUP or, if it cannot be made, QUEUE_FULL."""
        space, blocks = self._machine.page_wanted(session, group)
        if blocks is not None:
            self._make(session, group, space, blocks)
        try:
            return self._pages[space].dup()
        except OSError as error:
            raise _no_room(error) from error

    def _make(self, session: SessionId, group: int, space: SpaceId, blocks: int) -> None:
        try:
            page = SharedPage(blocks, self._boot_nonce)
        except OSError as error:
            raise _no_room(error) from error
        try:
            self._publish(PublishPage(session, group, page.native))
        except BaseException:
            page.close()
            raise
        self._pages[space] = page

    def withdraw(self, space: SpaceId) -> None:
        """Nobody uses the space any more."""
        self._pages.pop(space).close()

    @property
    def size_bytes(self) -> int:
        """Of all pages, as far as they could be filled."""
        return sum(page.size_bytes for page in self._pages.values())

    def __len__(self) -> int:
        return len(self._pages)


def _no_room(error: OSError) -> Refusal:
    return Refusal(
        Reason.QUEUE_FULL, f"the daemon cannot make an index page ({error.strerror}): go on without"
    )
