"""A worker's side of the connector: it shares the KV cache and has the doorbells rung."""
