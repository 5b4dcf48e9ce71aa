"""A part waits for its doorbell, and holds up no other."""

from tests.integration.worker.test_gates import *  # noqa: F403
