"""The `kvtierd` command: runs the daemon, and looks at its configuration."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from kvtierd import logs
from kvtierd.cli.socket_option import FLAGS as SOCKET_FLAGS
from kvtierd.cli.socket_option import SOCKET_HELP, given_before, note, socket_options
from kvtierd.config import daemon as configuration
from kvtierd.config import settings
from kvtierd.config.reading import all_flags

EXIT_USAGE = 2
"""The exit status if only the command line is wrong: it has unknown flags."""
EXIT_CONFIG = 78
"""The exit status if the configuration cannot be used (sysexits.h EX_CONFIG)."""
EXIT_CANNOT_START = 69
"""The exit status if something that the daemon needs is not available (sysexits.h EX_UNAVAILABLE)."""


class Configurable(click.Command):
    """Keeps flags that it does not know, so that they are reported together with everything else that is
    wrong. Its help shows flags by section of the configuration, each with its sentence."""

    ignore_unknown_options = True
    allow_extra_args = True

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {each.name: each.get_help_record(context) for each in self.get_params(context)}
        by_section: dict[str, list[str]] = {}
        for item, flag in all_flags(configuration.Config):
            by_section.setdefault(item.section, []).append(_name(flag))
        of_settings = {name for names in by_section.values() for name in names}
        rest = [name for name in shown if name is not None and name not in of_settings]
        groups = [
            (section.capitalize(), sentence, by_section[section])
            for section, sentence in settings.section_sentences(configuration.Config)
        ]
        for title, sentence, names in (("Options", "", rest), *groups):
            with formatter.section(title):
                if sentence:
                    formatter.write_text(sentence)
                    formatter.write_paragraph()
                formatter.write_dl([record for name in names if (record := shown[name]) is not None])


def _name(flag: str) -> str:
    """The name of the argument that click makes of a flag."""
    return flag.removeprefix("--").replace("-", "_")


def configurable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--config` and a flag for every setting to a command of the class Configurable."""
    for item, flag in reversed(list(all_flags(configuration.Config))):
        command = click.option(flag, metavar=item.metavar, hidden=flag != item.flag, help=_help(item))(
            command
        )
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help="TOML file; without it KVTIER_CONFIG, else /etc/kvtier/kvtierd.toml if it exists.",
    )(command)


def _help(item: settings.Setting) -> str:
    facts = [item.env] if item.short else []  # other variables follow from the section and the name
    if item.default not in (None, "", ()):  # else the sentence says what that means
        facts.append("default: " + configuration.as_toml(item, item.default).strip('"'))
    return f"{item.sentence}  [{'; '.join(facts)}]" if facts else item.sentence


def given_by(context: click.Context, values: dict[str, str | None]) -> dict[str, object]:
    """The given values by flag, among them a socket that was named before the subcommand."""
    given: dict[str, object] = {
        f"--{name.replace('_', '-')}": value for name, value in values.items() if value is not None
    }
    if (before := given_before(context)) is not None:
        for flag in SOCKET_FLAGS:
            note(context, flag, values.get(_name(flag)))
        given[SOCKET_FLAGS[0]] = before
    return given


def load(
    context: click.Context, config_file: Path | None, given: dict[str, object], program: str = "kvtierd"
) -> configuration.Loaded:
    """The configuration. If it cannot be used, says why, in the name of `program`, and ends the program."""
    try:
        return configuration.load(config_file, given, leftovers=context.args)
    except settings.ConfigError as error:
        _fail(error, EXIT_USAGE if all(each.usage for each in error.all) else EXIT_CONFIG, program)


def _fail(error: Exception, status: int, program: str = "kvtierd") -> NoReturn:
    click.echo(f"{program}: {error}", err=True)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kvtier", prog_name="kvtierd")
@socket_options(SOCKET_HELP)
def main() -> None:
    """The kvtier daemon: keeps inference engines' KV cache across their restarts and its own."""


@main.command(cls=Configurable)
@configurable
@click.pass_context
def serve(context: click.Context, /, config_file: Path | None, **flags: str | None) -> None:
    """Run the daemon in the foreground. SIGTERM drains and stops it; a second one stops it at once.

    Every flag below is a setting, and may be in the configuration file or in the environment as well:
    --pool-size 64GiB is `size = "64GiB"` in the file's section [pool], and KVTIER_POOL_SIZE=64GiB. Flags
    count more than the environment, which counts more than the file.
    """
    given = given_by(context, flags)
    loaded = load(context, config_file, given)
    # Imported late: `kvtierd config` and `--help` need neither gRPC nor the native core.
    from kvtierd.cli.interrupts import StoppedEarly
    from kvtierd.memory.errors import PoolError
    from kvtierd.preflight import NotReadyError
    from kvtierd.rpc.sockets import SocketError
    from kvtierd.service import serve as root
    from kvtierd.workers.supervisor.handles import WorkerStartError

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


@main.command(cls=Configurable)
@click.option(
    "--older-than-s",
    type=click.FloatRange(600.0),
    metavar="SECONDS",
    default=3_600.0,
    show_default=True,
    help="Leave packs alone that are younger.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@configurable
@click.pass_context
def collect(
    context: click.Context,
    /,
    config_file: Path | None,
    older_than_s: float,
    *,
    dry_run: bool,
    as_json: bool,
    **flags: str | None,
) -> None:
    """Make room in the store that hosts share (store.url), and lose no block.

    Packs whose blocks newer packs have as well are removed, and small packs are joined into larger ones. Run
    it from time to time on one host, while daemons use the store; its credentials must allow it to delete.
    What is merely old is for a lifecycle rule of the bucket. The exit status is 75 if the store did not do
    everything; a later run does the rest.
    """
    store = load(context, config_file, given_by(context, flags)).config.store
    if not store.url:
        nothing = settings.ConfigError("store.url", "", "name the store, for example s3://BUCKET/FOLDER")
        _fail(nothing, EXIT_CONFIG)
    from kvtierd.cli.collecting import EXIT_INCOMPLETE, as_text, collect_once, leave
    from kvtierd.core.errors import Refusal

    try:
        collected = collect_once(store, older_than_s, dry_run=dry_run, quiet=as_json)
    except Refusal as refusal:
        _fail(refusal, EXIT_CANNOT_START)
    click.echo(json.dumps(dataclasses.asdict(collected)) if as_json else as_text(collected, dry_run=dry_run))
    leave(EXIT_INCOMPLETE if collected.failures else 0)


@main.group()
@socket_options(SOCKET_HELP)
def config() -> None:
    """Look at the configuration."""


@config.command(cls=Configurable)
@configurable
@click.pass_context
def check(context: click.Context, /, config_file: Path | None, **flags: str | None) -> None:
    """Check the configuration; say what is wrong, and exit with 78 then."""
    loaded = load(context, config_file, given_by(context, flags))
    settings_given = "1 setting" if len(loaded.given) == 1 else f"{len(loaded.given)} settings"
    click.echo(
        f"nothing is wrong with the configuration ({loaded.file or 'no file'}, {settings_given} given); "
        "`kvtierctl doctor` with the same flags says whether this host can run it"
    )


@config.command(cls=Configurable)
@configurable
@click.pass_context
def show(context: click.Context, /, config_file: Path | None, **flags: str | None) -> None:
    """Print the whole configuration as TOML, with what each setting means and where it came from."""
    click.echo(configuration.show(load(context, config_file, given_by(context, flags))), nl=False)
