"""The index pages of this host. A page is made when a client first asks for it, and closed when nobody uses
its space any more."""

from collections.abc import Callable

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SessionId, SpaceId
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import PublishPage
from kvtierd.memory.index_page import SharedPage


class SharedPages:
    """The page of each space that has one. For use on the event loop only."""

    def __init__(
        self, machine: Machine, publish: Callable[[PublishPage], object], boot_nonce: int, pages_max: int
    ) -> None:
        """`pages_max`: each page takes a descriptor."""
        self._machine = machine
        self._pages_max = pages_max
        self._publish = publish
        self._boot_nonce = boot_nonce
        self._pages: dict[SpaceId, SharedPage] = {}

    def open(self, session: SessionId, group: int) -> int:
        """A descriptor of the page of one group, for the instance for which a session schedules. The caller
        closes it. Raises Refusal ROLE, INSTANCE_INCOMPLETE, UNKNOWN_GROUP or, if there are too many pages or
        this one cannot be made, QUEUE_FULL."""
        space, blocks = self._machine.page_wanted(session, group)
        if blocks is not None:
            self._make(session, group, space, blocks)
        try:
            return self._pages[space].dup()
        except OSError as error:
            raise _no_room(error) from error

    def _make(self, session: SessionId, group: int, space: SpaceId, blocks: int) -> None:
        if len(self._pages) >= self._pages_max:
            raise Refusal(
                Reason.QUEUE_FULL,
                f"the daemon has as many index pages as its open files allow ({self._pages_max}): go on "
                "without, or raise the limit of open files (kvtierctl doctor says how many are wanted)",
                field="open_index.group",
                value=group,
            )
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
        """Closes the page of a space that nobody uses any more."""
        self._pages.pop(space).close()

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages, as if they were full."""
        return sum(page.size_bytes for page in self._pages.values())

    def __len__(self) -> int:
        return len(self._pages)


def _no_room(error: OSError) -> Refusal:
    return Refusal(
        Reason.QUEUE_FULL, f"the daemon cannot make an index page ({error.strerror}): go on without"
    )
