"""The `kvtierctl` command."""
