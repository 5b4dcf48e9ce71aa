"""The disk tier: a slab file on each disk, its image in memory, and the worker that touches the disk."""
