"""The worker of one disk: the only process that opens, locks, reads and writes its slab file."""
