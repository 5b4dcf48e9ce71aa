"""The light kvtier client: grpcio, protobuf, numpy and the native core; no daemon code, no torch."""
