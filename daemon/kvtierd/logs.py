"""Structured logs: readable lines on a terminal, JSON lines for machines. Fields are in `extra={"kv":
{...}}`.

Block hashes are never logged at info or above, because they tell what a tenant's prompts have in common.
"""

import json
import logging
import os
import select
import sys
import time
from datetime import UTC, datetime
from typing import TextIO


class Fields(logging.LoggerAdapter[logging.Logger]):
    """A logger whose keyword arguments become fields: `log.info("session ended", session=3, why="...")`."""

    _OWN = frozenset({"exc_info", "stack_info", "stacklevel"})

    def process(self, msg: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:  # type: ignore[override]
        fields = {name: value for name, value in kwargs.items() if name not in self._OWN}
        own = {name: value for name, value in kwargs.items() if name in self._OWN}
        return msg, {**own, "extra": {"kv": fields}}

    # These are typed here because the adapter's own signatures know no field names.
    def debug(self, msg: object, **fields: object) -> None:  # type: ignore[override]
        self.log(logging.DEBUG, msg, **fields)  # type: ignore[arg-type]

    def info(self, msg: object, **fields: object) -> None:  # type: ignore[override]
        self.log(logging.INFO, msg, **fields)  # type: ignore[arg-type]

    def warning(self, msg: object, **fields: object) -> None:  # type: ignore[override]
        self.log(logging.WARNING, msg, **fields)  # type: ignore[arg-type]

    def error(self, msg: object, **fields: object) -> None:  # type: ignore[override]
        self.log(logging.ERROR, msg, **fields)  # type: ignore[arg-type]

    def critical(self, msg: object, **fields: object) -> None:  # type: ignore[override]
        self.log(logging.CRITICAL, msg, **fields)  # type: ignore[arg-type]


def logger(name: str) -> Fields:
    return Fields(logging.getLogger(name), {})


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "kv", {})


class HumanFormatter(logging.Formatter):
    """`12:30:01.250 info  session attached  session=3 instance=demo`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={_short(value)}" for name, value in _fields(record).items())
        head = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():<8} {record.getMessage()}"
        line = f"{head} {fields}" if fields else head
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _short(value: object) -> str:
    text = str(value)
    return (
        json.dumps(text, ensure_ascii=False)
        if not text or any(c.isspace() or c == '"' for c in text)
        else text
    )


def rfc3339(seconds: float) -> str:
    """A time since 1970 as `2026-11-23T04:05:06.123456Z`."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, in UTC), `level`, `logger`, `message`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in _fields(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class PatientHandler(logging.StreamHandler[TextIO]):
    """Writes to a file, pipe or terminal, and never waits for its reader: it drops lines instead, and says
    so.

    An event loop that logs into a full pipe would stand still until somebody reads.
    """

    PIPE_BYTES = 4096
    """What a writable pipe takes without blocking (PIPE_BUF)."""
    WAIT_MS = 20
    """How long to wait with the rest of a line whose beginning is written."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.dropped = 0
        self._fd = stream.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n"
            if self.dropped:
                about = logging.LogRecord(
                    __name__,
                    logging.WARNING,
                    "",
                    0,
                    f"{self.dropped} lines were dropped: nobody read",
                    None,
                    None,
                )
                line = f"{self.format(about)}\n{line}"
            if self._write(line.encode(errors="backslashreplace")):
                self.dropped = 0
            else:
                self.dropped += 1
        except Exception:
            self.handleError(record)

    def _write(self, data: bytes) -> bool:
        for first in range(0, len(data), self.PIPE_BYTES):
            if not self._poll.poll(self.WAIT_MS if first else 0):
                return first > 0
            try:
                os.write(self._fd, data[first : first + self.PIPE_BYTES])
            except OSError:
                return False
        return True


def configure(level: str, style: str, stream: TextIO | None = None) -> None:
    """Sends everything under `kvtierd`, and warnings of other loggers, to `stream` (by default stderr), and
    replaces handlers.

    `style` is human, json, or auto, which is human if the stream is a terminal.
    """
    target = stream if stream is not None else sys.stderr
    human = style == "human" or (style == "auto" and target.isatty())
    try:
        handler: logging.StreamHandler[TextIO] = PatientHandler(target)
    except OSError:  # the stream has no descriptor
        handler = logging.StreamHandler(target)
    handler.setFormatter(HumanFormatter() if human else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Sets the level of everything under `kvtierd`: debug, info, warning or error."""
    logging.getLogger("kvtierd").setLevel(level.upper())
