"""`python -m kvtierd.ctl` is the `kvtierctl` command."""

from kvtierd.cli.entry import kvtierctl

kvtierctl()
