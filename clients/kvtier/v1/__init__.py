"""Code generated from proto/kvtier/v1 by `make generate`; do not edit."""
