"""The `kvtierd` command: serve, and look at the configuration."""

if __name__ == "__main__":  # first of all: what follows takes a second to import
    from kvtierd.entry import kvtierd

    kvtierd()

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from kvtierd import config as configuration
from kvtierd import logs, settings

EXIT_CONFIG = 78
"""The configuration cannot be used (sysexits.h EX_CONFIG)."""
EXIT_CANNOT_START = 69
"""Something the daemon needs is not to be had (sysexits.h EX_UNAVAILABLE)."""


def _configurable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--config` and a flag for every setting."""
    for item in reversed(list(settings.declared(configuration.Config))):
        command = click.option(
            item.flag, item.key.replace(".", "__"), metavar=item.metavar, help=_help(item)
        )(command)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help="TOML file; without it KVTIER_CONFIG, else /etc/kvtier/kvtierd.toml if it exists.",
    )(command)


def _help(item: settings.Setting) -> str:
    if item.default in (None, "", ()):  # the sentence says what that means
        return item.sentence
    shown = configuration.as_toml(item, item.default).strip('"')
    return f"{item.sentence}  [default: {shown}]"


class _Sectioned(click.Command):
    """Shows its flags by the sections of the configuration, each with its sentence."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {each.name: each.get_help_record(context) for each in self.get_params(context)}
        of_settings: set[str | None] = set()
        groups = []
        for section, sentence in settings.sections(configuration.Config):
            names = [name for name in shown if name is not None and name.startswith(f"{section}__")]
            of_settings.update(names)
            groups.append((section.capitalize(), sentence, names))
        rest = [name for name in shown if name not in of_settings]
        for title, sentence, names in (("Options", "", rest), *groups):
            with formatter.section(title):
                if sentence:
                    formatter.write_text(sentence)
                    formatter.write_paragraph()
                formatter.write_dl([record for name in names if (record := shown[name]) is not None])


def _given(flags: dict[str, str | None]) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in flags.items() if value is not None}


def _load(config_file: Path | None, flags: dict[str, str | None]) -> configuration.Loaded:
    try:
        return configuration.load(config_file, _given(flags))
    except settings.ConfigError as error:
        _fail(error, EXIT_CONFIG)


def _fail(error: Exception, status: int) -> NoReturn:
    click.echo(f"kvtierd: {error}", err=True)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvtier", prog_name="kvtierd")
def main() -> None:
    """The kvtier daemon: keeps inference engines' KV cache across their restarts and its own."""


@main.command(cls=_Sectioned)
@_configurable
def serve(config_file: Path | None, **flags: str | None) -> None:
    """Run the daemon in the foreground. SIGTERM drains and stops it; a second one stops it at once.

    Every flag below is a setting, and may be in the configuration file or in the environment as well:
    --pool-size 64GiB is `size = "64GiB"` in the file's section [pool], and KVTIER_POOL_SIZE=64GiB. Flags
    count more than the environment, which counts more than the file.
    """
    loaded = _load(config_file, flags)
    given = _given(flags)
    # Imported late: `kvtierd config` and `--help` need neither gRPC nor the native core.
    from kvtierd import serve as root
    from kvtierd.interrupts import StoppedEarly
    from kvtierd.memory import PoolError
    from kvtierd.preflight import NotReadyError
    from kvtierd.rpc.sockets import SocketError
    from kvtierd.transfer.supervisor import WorkerStartError

    logs.configure(loaded.config.log.level, loaded.config.log.format)
    try:
        sys.exit(root.run(loaded, lambda: configuration.load(config_file, given).config))
    except NotReadyError as error:
        _fail(error, error.status)
    except settings.ConfigError as error:
        _fail(error, EXIT_CONFIG)
    except (PoolError, SocketError, WorkerStartError) as error:
        _fail(error, EXIT_CANNOT_START)
    except StoppedEarly as error:
        click.echo(f"kvtierd: {error} before it was serving", err=True)
        sys.exit(error.status)


@main.group()
def config() -> None:
    """Look at the configuration."""


@config.command(cls=_Sectioned)
@_configurable
def check(config_file: Path | None, **flags: str | None) -> None:
    """Check the configuration; say what is wrong, and exit with 78 then."""
    loaded = _load(config_file, flags)
    click.echo(f"the configuration is sound ({loaded.file or 'no file'}, {len(loaded.given)} settings given)")


@config.command(cls=_Sectioned)
@_configurable
def show(config_file: Path | None, **flags: str | None) -> None:
    """Print the whole configuration as TOML, with what each setting means and where it came from."""
    click.echo(configuration.show(_load(config_file, flags)), nl=False)
