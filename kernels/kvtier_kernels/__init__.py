"""The native core of kvtier: block table, copies and their plans, shared words, pool records and checksums.

Array arguments are C-contiguous numpy arrays of exactly the dtype named. Every call checks all of its input
before it changes anything: a ValueError names argument, index and value, and leaves everything as it was.
"""

from kvtier_kernels._native import *  # noqa: F403 - all that it has, and nothing else
