"""Ends a worker whose CUDA context is lost."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from kvtier_kernels.cuda import CudaError

from kvtierd.workers.log import logger

CONTEXT_LOST_STATUS = 76

_log = logger(__name__)


def leave(why: str, error: BaseException) -> NoReturn:
    """Ends the process at once and without a report: nobody knows which of its copies have landed, and its
    end is the fence of every part that has started."""
    _log.critical("the worker ends at once", why=why, error=str(error))
    logging.shutdown()
    os._exit(CONTEXT_LOST_STATUS)


@contextmanager
def context_guard() -> Iterator[None]:
    """For driver calls whose failure is no disaster: CudaErrors pass, except those that say that the context
    is lost."""
    try:
        yield
    except CudaError as error:
        if error.sticky:
            leave("its CUDA context is lost", error)
        raise


@contextmanager
def must_succeed(what: str) -> Iterator[None]:
    """For driver calls after whose failure nobody could say what the GPU still does."""
    try:
        yield
    except CudaError as error:
        leave(f"{what} failed", error)
