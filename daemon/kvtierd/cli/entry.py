"""The entry points of `kvtierd` and `kvtierctl`. They take over signals before the imports, which take up to
a second."""

import signal

from kvtierd.cli import interrupts


def kvtierd() -> None:
    """Runs the `kvtierd` command."""
    words = "kvtierd: stopped by {signal} before it was serving"
    interrupts.leave_at_once(words, signal.SIGINT, signal.SIGTERM)
    from kvtierd.cli.commands import main

    main(prog_name="kvtierd")


def kvtierctl() -> None:
    """Runs the `kvtierctl` command."""
    interrupts.leave_at_once("kvtierctl: interrupted", signal.SIGINT, signal.SIGTERM)
    from kvtierd.ctl.commands import main

    main(prog_name="kvtierctl")
