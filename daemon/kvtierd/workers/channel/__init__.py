"""Packets with file descriptors between the daemon and its workers, and the workers' status pages."""
