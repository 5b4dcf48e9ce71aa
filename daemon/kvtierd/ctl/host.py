"""`kvtierctl doctor`, and shell completion: commands that need no daemon."""

import json
import os
import pwd
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from kvtierd.cli.socket_option import SOCKET_HELP, socket_options
from kvtierd.config import daemon as configuration
from kvtierd.config import settings
from kvtierd.preflight import Finding, Verdict, examine
from kvtierd.preflight.user import acting_as, owner

EXIT_FAILED = 1
EXIT_CONFIG = 78
MARKS = {Verdict.OK: "ok     ", Verdict.WARNING: "warning", Verdict.FAILURE: "FAILURE"}


@click.command()
@socket_options(SOCKET_HELP, expose=True)
@click.option(
    "--user",
    metavar="NAME",
    help="Look as this user, if you are root; default: whom the daemon that runs, or else the pool's folder, "
    "belongs to.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of what was looked at.")
def doctor(socket: Path | None, user: str | None, as_json: bool) -> None:
    """Look at this host, with the configuration that kvtierd would use, and say what to change.

    The checks are those of `kvtierd serve`, which does not start while one of them fails. What a daemon that
    runs with this configuration uses is well. Run it as the daemon's user or as root, with the daemon's
    environment and limits. Exit status 1: a check has failed. 78: the configuration cannot be used.
    """
    try:
        loaded = configuration.load(flags={"--socket": str(socket)} if socket else {})
    except settings.ConfigError as error:
        click.echo(f"kvtierctl: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    try:
        looks_as = pwd.getpwnam(user) if user else owner(loaded.config)
    except KeyError:
        raise click.BadParameter("there is no such user", param_hint="--user") from None
    if os.geteuid() not in (0, looks_as.pw_uid):
        raise click.BadParameter("only root can look as another user", param_hint="--user")
    with acting_as(looks_as):
        findings = examine(loaded, may_run=True)
    if as_json:
        click.echo(json.dumps([plain(each) for each in findings], indent=2))
    else:
        click.echo(f"configuration: {loaded.file or 'no file'}, {len(loaded.given)} settings given")
        click.echo(f"user:          {looks_as.pw_name} (uid {looks_as.pw_uid})")
        for each in findings:
            click.echo("\n".join(lines(each)))
    if any(each.verdict is Verdict.FAILURE for each in findings):
        sys.exit(EXIT_FAILED)


def plain(finding: Finding) -> dict[str, str | None]:
    """A finding for programs; `field` and `value` are null where it is about no setting."""
    return {
        "name": finding.name,
        "verdict": finding.verdict.value,
        "found": finding.found,
        "remedy": finding.remedy,
        "field": finding.field or None,
        "value": str(finding.value) if finding.field else None,
    }


def lines(finding: Finding) -> list[str]:
    """A finding for people."""
    about = f" ({finding.field} = {finding.value})" if finding.remedy and finding.field else ""
    text = [f"{MARKS[finding.verdict]}  {finding.name}{about}: {finding.found}"]
    return [*text, f"{'':9}{finding.remedy}"] if finding.remedy else text


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell: `source <(kvtierctl completion bash)`."""
    complete = get_completion_class(shell)
    assert complete is not None
    root = context.find_root().command
    click.echo(complete(root, {}, "kvtierctl", "_KVTIERCTL_COMPLETE").source())
