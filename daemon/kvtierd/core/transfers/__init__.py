"""Lookups, leases and transfers, from the question to the end of the last part."""
