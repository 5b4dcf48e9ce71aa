"""The scheduler's side of the connector: it looks up, submits loads and stores, and follows them."""
