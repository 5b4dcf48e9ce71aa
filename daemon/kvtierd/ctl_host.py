"""`kvtierctl doctor`, and shell completion: commands that need no daemon."""

import json
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from kvtierd import config as configuration
from kvtierd import settings
from kvtierd.doctor import Finding, Verdict, examine
from kvtierd.socket_option import SOCKET_HELP, socket_options

EXIT_FAILED = 1
EXIT_CONFIG = 78
MARKS = {Verdict.OK: "ok  ", Verdict.WARN: "warn", Verdict.FAIL: "FAIL"}


@click.command()
@socket_options(SOCKET_HELP, expose=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of what was looked at.")
def doctor(socket: Path | None, as_json: bool) -> None:
    """Look at this host, with the configuration that kvtierd would use, and say what to change.

    Run it as the daemon's user, with its environment. Exit status 1: something would keep the daemon from
    starting, or from doing what it is configured to. 78: the configuration cannot be used.
    """
    try:
        loaded = configuration.load(flags={"--socket": str(socket)} if socket else {})
    except settings.ConfigError as error:
        click.echo(f"kvtierctl: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    findings = list(examine(loaded.config))
    if as_json:
        found = [
            {"about": each.about, "verdict": each.verdict.value, "found": each.found, "advice": each.advice}
            for each in findings
        ]
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(f"configuration: {loaded.file or 'no file'}, {len(loaded.given)} settings given")
        for each in findings:
            click.echo("\n".join(lines(each)))
    if any(each.verdict is Verdict.FAIL for each in findings):
        sys.exit(EXIT_FAILED)


def lines(finding: Finding) -> list[str]:
    """A finding for people."""
    text = [f"{MARKS[finding.verdict]}  {finding.about}: {finding.found}"]
    return [*text, f"      {finding.advice}"] if finding.advice else text


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell: `source <(kvtierctl completion bash)`."""
    complete = get_completion_class(shell)
    assert complete is not None
    root = context.find_root().command
    click.echo(complete(root, {}, "kvtierctl", "_KVTIERCTL_COMPLETE").source())
