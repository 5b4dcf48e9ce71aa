"""The store tier, as the core sees it."""
