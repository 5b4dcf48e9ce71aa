"""A real daemon for the campaigns."""

from tests.integration.daemon.conftest import start

__all__ = ["start"]
