"""What the core knows: its objects, the states they can be in, and the disks."""
