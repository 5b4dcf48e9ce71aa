"""What a client knows of its session with the daemon, without any I/O. `state` holds all of it together."""
