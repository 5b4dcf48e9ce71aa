"""The supervisor of workers, which starts, watches and replaces them, and tells the core about them."""
