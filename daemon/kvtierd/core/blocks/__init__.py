"""Blocks of one tier: the block table, the slots, eviction, and how long blocks are kept."""
