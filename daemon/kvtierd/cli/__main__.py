"""`python -m kvtierd.cli` is the `kvtierd` command."""

from kvtierd.cli.entry import kvtierd

kvtierd()
