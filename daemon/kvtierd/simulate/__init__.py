"""What a cache of another size would have hit: traces of requests, replayed through the daemon's own core."""
