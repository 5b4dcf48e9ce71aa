"""What a daemon imports before it knows its settings: imported once, by the process whose forks daemons are
(`forks`)."""

from kvtierd.cli.entry import prepare_grpc

prepare_grpc()

import kvtierd.cli.commands  # noqa: E402
import kvtierd.service.daemon  # noqa: E402
import kvtierd.service.serve  # noqa: E402, F401
