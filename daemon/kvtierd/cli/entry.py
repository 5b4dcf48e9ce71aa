"""The entry points of `kvtierd` and `kvtierctl`. They take over signals before the imports, which take up to
a second."""

import os
import signal

from kvtierd.cli import interrupts


def quiet_grpc() -> None:
    """Has gRPC, which must not be imported yet, write errors only. Otherwise it writes a line for each
    handshake that fails, and anybody who reaches the remote port could fill the log."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def kvtierd() -> None:
    """Runs the `kvtierd` command."""
    words = "kvtierd: stopped by {signal} before it was serving"
    interrupts.leave_at_once(words, signal.SIGINT, signal.SIGTERM)
    quiet_grpc()
    from kvtierd.cli.commands import main

    main(prog_name="kvtierd")


def kvtierctl() -> None:
    """Runs the `kvtierctl` command."""
    interrupts.leave_at_once("kvtierctl: interrupted", signal.SIGINT, signal.SIGTERM)
    from kvtierd.ctl.commands import main

    main(prog_name="kvtierctl")
