"""The native core of kvtier: block table and index, fragment copies, shared words and checksums."""
