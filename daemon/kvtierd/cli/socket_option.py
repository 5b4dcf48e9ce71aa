"""The option `--socket` of kvtierd and kvtierctl, which may stand before or after the subcommand, and has a
longer name too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvtierd.config import daemon as configuration
from kvtierd.config import settings
from kvtierd.config.reading import absolute_socket

FLAGS = ("--socket", "--server-socket")
"""The two names of the flag; help shows the first."""
SOCKET_HELP = "The daemon's gRPC socket.  [KVTIER_SOCKET; default: where kvtierd puts it]"
_SAID = "kvtierd.socket"


def socket_options(text: str, *, expose: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the flags to a command or a group; `said` returns what they say. With `expose`, the command gets
    that as its argument `socket`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        long = click.option(FLAGS[1], metavar="PATH", hidden=True, expose_value=False, callback=_note)
        short = click.option(
            FLAGS[0],
            "socket",
            metavar="PATH",
            help=text,
            expose_value=expose,
            callback=_note_and_tell if expose else _note,
        )
        return short(long(command))

    return add


def given_before(context: click.Context) -> str | None:
    """The socket as it was written before the subcommand; None if it was not."""
    known = context.meta.get(_SAID)
    return known[1] if known else None


def said(context: click.Context) -> Path | None:
    """The socket that the command line names, from the root; None if it names none."""
    raw = context.meta.get(_SAID)
    if not raw:
        return None
    try:
        found = settings.socket(absolute_socket(raw[1]))
    except ValueError as error:
        raise click.BadParameter(f"{raw[1]!r}: {error}", param_hint=raw[0]) from None
    if found is not None and (why := configuration.check_socket(found)):
        raise click.BadParameter(f"{raw[1]!r}: {why}", param_hint=raw[0])
    return found


def note(context: click.Context, flag: str, value: str | None) -> None:
    """Keeps what a flag says, for all subcommands. Two flags, or one in two places, must mean the same:
    raises UsageError otherwise."""
    if not value:
        return
    known = context.meta.get(_SAID)
    if known is not None and absolute_socket(known[1]) != absolute_socket(value):
        raise click.UsageError(
            f"{known[0]} says {known[1]!r} and {flag} says {value!r}, and both mean the daemon's socket: "
            "leave one of them out"
        )
    context.meta[_SAID] = known or (flag, value)


def _note(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    note(context, parameter.opts[0], value)


def _note_and_tell(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    _note(context, parameter, value)
    # click handles the given flags of a command first, so the other one has been noted by now.
    return said(context)
