"""The supervisor of workers: it starts, watches and replaces them, and tells the core about them."""
