"""Bytes go where they belong, or the block is reported as failed: by every way of copying."""

from tests.integration.worker.test_copies import *  # noqa: F403

METHODS = ("auto", "loop", "rows")
