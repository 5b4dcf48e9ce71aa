"""Lookups, leases and transfers, from a lookup to the end of the last part."""
