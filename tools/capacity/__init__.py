"""How much a fleet asks of a shared store, and what that costs: docs/capacity.md."""
