"""A neutral benchmark of caches below engines: kvtier beside others, in one run (`make bench-peers`)."""
