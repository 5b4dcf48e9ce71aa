"""What the core decides about disks: writing, promotion, health and scrubs."""
