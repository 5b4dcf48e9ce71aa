"""Tests of many examples judge what is computed, not how long it takes."""

from hypothesis import settings

# Hypothesis fails an example that takes more than 200 ms, and a test whose first examples take more than a
# second to make: a process that waits for the processor is as slow as that at any example. It is loaded here,
# before any test is imported.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")
