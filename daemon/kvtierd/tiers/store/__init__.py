"""The store tier: blocks in a store that several hosts share."""
