"""`kvtierctl doctor`, and shell completion: commands that need no daemon."""

import json
import os
import pwd
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtierd.cli.commands import Configurable, configurable, given_by, load
from kvtierd.ctl.terminal import show
from kvtierd.ctl.text import count
from kvtierd.preflight import OF_DOCTOR, Finding, Verdict, examine
from kvtierd.preflight.user import acting_as, owner

EXIT_FAILED = 1
MARKS = {Verdict.OK: "ok     ", Verdict.WARNING: "warning", Verdict.FAILURE: "FAILURE"}
STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}


@click.command(cls=Configurable)
@configurable
@click.option(
    "--user",
    metavar="NAME",
    help="Look as this user, if you are root; default: whom the daemon that runs, or else the pool's folder, "
    "belongs to.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of what was looked at.")
@click.pass_context
def doctor(
    context: click.Context, /, config_file: Path | None, user: str | None, as_json: bool, **flags: str | None
) -> None:
    """Look at this host, with the configuration that kvtierd would use, and say what to change.

    The flags and the checks are those of `kvtierd serve`, which does not start while one of them fails. What
    a daemon that runs with this configuration uses is well. Run it as the daemon's user or as root, with the
    daemon's environment and limits. Exit status 1: a check has failed. 78: the configuration cannot be used.
    """
    loaded = load(context, config_file, given_by(context, flags), "kvtierctl")
    try:
        looks_as = pwd.getpwnam(user) if user else owner(loaded.config)
    except KeyError:
        raise click.BadParameter("there is no such user", param_hint="--user") from None
    if os.geteuid() not in (0, looks_as.pw_uid):
        raise click.BadParameter("only root can look as another user", param_hint="--user")
    with acting_as(looks_as):
        findings = examine(loaded, may_run=True, checks=OF_DOCTOR)
    if as_json:
        click.echo(json.dumps([plain(each) for each in findings], indent=2))
    else:
        show(page(findings, str(loaded.file or "no file"), len(loaded.given), looks_as))
    if any(each.verdict is Verdict.FAILURE for each in findings):
        sys.exit(EXIT_FAILED)


def plain(finding: Finding) -> dict[str, str | None]:
    """A finding for programs; `field` and `value` are null if it is about no setting."""
    return {
        "name": finding.name,
        "verdict": finding.verdict.value,
        "found": finding.found,
        "remedy": finding.remedy,
        "field": finding.field or None,
        "value": str(finding.value) if finding.field else None,
    }


def page(findings: Iterable[Finding], file: str, given: int, user: pwd.struct_passwd) -> RenderableType:
    """The findings for people, below what they are about."""
    head = Table.grid(padding=(0, 1, 0, 0))
    head.add_row("configuration:", f"{file}, {count(given, 'setting')} given")
    head.add_row("user:", f"{user.pw_name} (uid {user.pw_uid})")
    grid = Table.grid(padding=(0, 2, 0, 0))
    for each in findings:
        about = f" ({each.field} = {each.value})" if each.remedy and each.field else ""
        text = Text.assemble((each.name, "bold"), f"{about}: {each.found}")
        if each.remedy:
            text.append(f"\n{each.remedy}", "cyan")
        grid.add_row(Text(MARKS[each.verdict], STYLES[each.verdict]), text)
    return Group(head, grid)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell: `source <(kvtierctl completion bash)`."""
    complete = get_completion_class(shell)
    assert complete is not None
    root = context.find_root().command
    click.echo(complete(root, {}, "kvtierctl", "_KVTIERCTL_COMPLETE").source())
