"""Refusals of the core. A refusal is raised before anything has changed, and its message says what to do."""

from kvtier_kernels.reasons import Reason

__all__ = ["Reason", "Refusal"]


class Refusal(Exception):
    """A call that was refused; nothing has changed.

    `field` names the field at fault, `value` is what it held (cut to 120 characters), and `message` says what
    is wrong and what to do about it. A transfer that fails carries a Refusal as its cause, so it is also used
    as a value.
    """

    def __init__(self, reason: Reason, message: str, *, field: str = "", value: object = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.value = str(value)[:120]
        self.message = message

    def __str__(self) -> str:
        where = f" [{self.field}={self.value}]" if self.field else ""
        return f"{self.reason.name}: {self.message}{where}"
