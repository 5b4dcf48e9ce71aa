"""What the clients for inference engines share."""
