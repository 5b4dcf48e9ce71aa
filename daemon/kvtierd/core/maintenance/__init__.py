"""What operators ask about blocks, and what is checked in the background."""
