"""The daemon's settings: how they are declared, read, checked and changed while it runs."""
