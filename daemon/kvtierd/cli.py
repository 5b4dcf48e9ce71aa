"""The `kvtierd` command: serve, and look at the configuration."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from kvtierd import config as configuration
from kvtierd import logs, settings
from kvtierd.reading import all_flags
from kvtierd.socket_option import FLAGS as SOCKET_FLAGS
from kvtierd.socket_option import SOCKET_HELP, given_before, note, socket_options

EXIT_USAGE = 2
"""Only the command line is wrong: it has flags that there are not."""
EXIT_CONFIG = 78
"""The configuration cannot be used (sysexits.h EX_CONFIG)."""
EXIT_CANNOT_START = 69
"""Something the daemon needs is not to be had (sysexits.h EX_UNAVAILABLE)."""


class _Configurable(click.Command):
    """Keeps what is no flag of its own, so that it is told together with all else that is wrong."""

    ignore_unknown_options = True
    allow_extra_args = True


def _configurable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--config` and a flag for every setting."""
    for item, flag in reversed(list(all_flags(configuration.Config))):
        shown = item.default if item.default not in (None, "", ()) else "see above"
        if item.parse is settings.size and item.default:
            shown = settings.format_size(item.default)
        command = click.option(
            flag,
            metavar=item.metavar,
            hidden=flag != item.flag,
            help=f"{item.sentence}  [{item.env}; default: {shown}]",
        )(command)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help="TOML file; without it KVTIER_CONFIG, else /etc/kvtier/kvtierd.toml if it exists.",
    )(command)


def _given(context: click.Context, values: dict[str, str | None]) -> dict[str, object]:
    """By flag; a socket that was named before the subcommand is among them."""
    given: dict[str, object] = {
        f"--{name.replace('_', '-')}": value for name, value in values.items() if value is not None
    }
    if (before := given_before(context)) is not None:
        for flag in SOCKET_FLAGS:
            note(context, flag, values.get(flag.removeprefix("--").replace("-", "_")))
        given[SOCKET_FLAGS[0]] = before
    return given


def _load(context: click.Context, config_file: Path | None, given: dict[str, object]) -> configuration.Loaded:
    try:
        return configuration.load(config_file, given, leftovers=context.args)
    except settings.ConfigError as error:
        _fail(error, EXIT_USAGE if all(each.usage for each in error.all) else EXIT_CONFIG)


def _fail(error: Exception, status: int) -> NoReturn:
    click.echo(f"kvtierd: {error}", err=True)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvtier", prog_name="kvtierd")
@socket_options(SOCKET_HELP)
def main() -> None:
    """The kvtier daemon: keeps inference engines' KV cache across their restarts and its own."""


@main.command(cls=_Configurable)
@_configurable
@click.pass_context
def serve(context: click.Context, /, config_file: Path | None, **flags: str | None) -> None:
    """Run the daemon in the foreground. SIGTERM drains and stops it; a second one stops it at once."""
    given = _given(context, flags)
    loaded = _load(context, config_file, given)
    # Imported late: `kvtierd config` and `--help` need neither gRPC nor the native core.
    from kvtierd import serve as root
    from kvtierd.memory import PoolError
    from kvtierd.rpc.sockets import SocketError
    from kvtierd.transfer.supervisor import WorkerStartError

    logs.configure(loaded.config.log.level, loaded.config.log.format)
    try:
        sys.exit(root.run(loaded.config, lambda: configuration.load(config_file, given).config))
    except settings.ConfigError as error:
        _fail(error, EXIT_CONFIG)
    except (PoolError, SocketError, WorkerStartError) as error:
        _fail(error, EXIT_CANNOT_START)
    except KeyboardInterrupt:
        _fail(RuntimeError("stopped before it was serving"), 130)


@main.group()
@socket_options(SOCKET_HELP)
def config() -> None:
    """Look at the configuration."""


@config.command(cls=_Configurable)
@_configurable
@click.pass_context
def check(context: click.Context, /, config_file: Path | None, **flags: str | None) -> None:
    """Check the configuration; say what is wrong, and exit with 78 then."""
    loaded = _load(context, config_file, _given(context, flags))
    click.echo(f"the configuration is sound ({loaded.file or 'no file'}, {len(loaded.given)} settings given)")


@config.command(cls=_Configurable)
@_configurable
@click.pass_context
def show(context: click.Context, /, config_file: Path | None, **flags: str | None) -> None:
    """Print the whole configuration as TOML, with what each setting means and where it came from."""
    click.echo(configuration.show(_load(context, config_file, _given(context, flags))), nl=False)


if __name__ == "__main__":
    main()
