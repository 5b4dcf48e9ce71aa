"""The kvtier daemon: one process tree per host that owns the host pool and serves engines over gRPC."""
