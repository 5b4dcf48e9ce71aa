"""Campaigns against engines, copy workers and daemons on a GPU behind the fake driver."""
