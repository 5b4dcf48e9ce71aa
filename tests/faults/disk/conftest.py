"""A disk's worker without a daemon."""

from tests.integration.disk.conftest import folder

__all__ = ["folder"]
