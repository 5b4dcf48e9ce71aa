"""The `kvtierd` command, and where both commands begin."""
