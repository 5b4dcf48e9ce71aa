"""Engines: processes attach and register, and workers come and go."""
