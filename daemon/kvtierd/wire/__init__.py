"""Code generated from proto/kvtierd/wire by `make generate`; do not edit."""
