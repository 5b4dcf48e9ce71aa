"""The entry points of `kvtierd` and `kvtierctl`. They take over signals before the imports, which take up to
a second."""

import gc
import os
import signal

from kvtierd.cli import interrupts


def prepare_grpc() -> None:
    """Sets how gRPC works, which must not be imported yet.

    It writes errors only. Otherwise it writes a line for each handshake that fails, and anybody who reaches
    the remote port could fill the log. Its server reads from connections with the one thread that it has for
    that, and not with the newer pool of threads, which wake each other up a dozen times for each message:
    half of what a daemon takes whose engines are idle.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")


def kvtierd() -> None:
    """Runs the `kvtierd` command."""
    words = "kvtierd: stopped by {signal} before it was serving"
    interrupts.leave_at_once(words, signal.SIGINT, signal.SIGTERM)
    prepare_grpc()
    # Imports leave no garbage, and looking for some takes a tenth of their time. A daemon that serves looks.
    gc.disable()
    from kvtierd.cli.commands import main

    main(prog_name="kvtierd")


def kvtierctl() -> None:
    """Runs the `kvtierctl` command."""
    interrupts.leave_at_once("kvtierctl: interrupted", signal.SIGINT, signal.SIGTERM)
    gc.disable()
    from kvtierd.ctl.commands import main

    gc.enable()
    main(prog_name="kvtierctl")
