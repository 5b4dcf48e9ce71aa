"""The tiers below the host."""
