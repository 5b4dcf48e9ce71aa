"""Log lines of a worker. They look like the daemon's, and each says which worker it is from."""

import logging
import os

from kvtierd.logs import Fields


class _WorkerFields(Fields):
    def process(self, msg: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:  # type: ignore[override]
        return super().process(msg, {"worker_pid": os.getpid(), **kwargs})


def logger(name: str) -> Fields:
    """A logger whose keyword arguments become fields, after the worker's pid."""
    return _WorkerFields(logging.getLogger(name), {})
