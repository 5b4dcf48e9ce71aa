"""What a client knows of its session with the daemon, without any input or output: `state` is the whole of
it."""
