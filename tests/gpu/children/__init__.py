"""Programs that steps and tests start beside themselves: engines, and processes that copy."""
