"""What a daemon imports before it knows its settings: imported once, by the process whose forks daemons are
(`forks`)."""

import kvtierd.cli.commands
import kvtierd.service.serve  # noqa: F401
