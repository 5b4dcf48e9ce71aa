"""The memory of one rank, which the engine lends and the daemon registers.

Like the session that owns it, this does no I/O and is used with the session's lock held.
"""

from kvtier.errors import ConnectionLostError, KvtierError, Reason
from kvtier.memory import Memory, device_of
from kvtier.session.attachment import Attachment
from kvtier.spec import AttachSpec
from kvtier.words import RankWords, WordsPage


class RankMemory:
    """Keeps track of what is to be registered, and of what the daemon has."""

    def __init__(self, spec: AttachSpec, words: RankWords) -> None:
        self.spec = spec
        """The rank, with the memory that is to be registered; without memory from `release` to `give`."""
        self.error: KvtierError | None = None
        """Why the last attempt to register failed."""
        self._words = words
        self._attachment: Attachment | None = None
        self._registering = False

    def attach(self, attachment: Attachment | None) -> None:
        """Sets the session's attachment. With None, nothing is registered."""
        self._attachment = attachment

    @property
    def wants_registration(self) -> bool:
        """Whether the steps of `steps.register` are due."""
        attachment = self._attachment
        return attachment is not None and not attachment.registered and self.spec.memory is not None

    @property
    def wants_release(self) -> bool:
        """Whether the steps of `steps.unregister` are due."""
        return self.registration is not None and self.spec.memory is None

    @property
    def registration(self) -> int | None:
        """The daemon's number of the memory that it has, or None."""
        return None if self._attachment is None else self._attachment.registration

    @property
    def released(self) -> bool:
        """Whether the engine has its memory back: the daemon touches none of it any more."""
        if self.spec.memory is not None or self._registering or self.registration is not None:
            return False
        return self._words.started() == 0

    # --- what the engine wants ---

    def release(self) -> None:
        """Takes the memory back for the engine; `released` says when that is done. Safe to call twice."""
        if not self.spec.role.holds_rank:
            message = "a scheduler has no memory: its ranks have"
            raise KvtierError(Reason.ROLE, message, field="role", value=self.spec.role.name)
        self.spec = self.spec.with_memory(None)
        if self._attachment is not None:
            self._attachment.withdraw()
        if not self._registering:  # else this happens when the registration ends
            self._words.seal()

    def give(self, memory: Memory) -> None:
        """Takes memory to register, after `release`. Raises KvtierError, and changes nothing, if it does not
        fit the groups, or if the memory before it is not released."""
        if not self.released:
            message = "there is memory already: release_memory must have returned True before"
            raise KvtierError(Reason.ALREADY_REGISTERED, message, field="memory", value=device_of(memory))
        self.spec = self.spec.with_memory(memory)
        self.error = None

    # --- what the steps report ---

    def begin(self) -> tuple[AttachSpec, Memory]:
        """Starts a registration of the memory. `end` must follow in any case."""
        assert self.spec.memory is not None
        self._registering = True
        return self.spec, self.spec.memory

    def new_page(self) -> WordsPage:
        """Makes a page of words for the registration. Raises ConnectionLostError without a session."""
        if self._attachment is None:
            raise ConnectionLostError("the session is over")
        return self._words.new_page()

    def registered(self, registration: int) -> None:
        """Notes that the daemon has registered words and memory."""
        self.error = None
        if self._attachment is not None:
            self._attachment.register(registration)

    def end(self) -> None:
        """Ends the registration, whether it succeeded or not. If it failed, the daemon drops what it has of
        it with the session."""
        self._registering = False
        if self.spec.memory is None:  # the memory was taken back meanwhile
            self.release()

    def unregistered(self) -> None:
        """Notes that the daemon has given up words and memory."""
        if self._attachment is not None:
            self._attachment.unregister()
