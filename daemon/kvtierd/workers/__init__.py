"""Worker processes that copy or move data on disks, their supervisor, and the channel between them."""
