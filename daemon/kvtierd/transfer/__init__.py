"""Copies between engines' memory and the host pool: workers, their supervisor, the channel between them."""
