"""What operators do with blocks and ask about them, and the checks in the background."""
