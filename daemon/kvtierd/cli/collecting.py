"""What `kvtierd collect` does and says."""

import asyncio
import os
import sys
from typing import NoReturn

import click

from kvtierd.config.settings import human_size
from kvtierd.config.store import StoreConfig
from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.coding import Compression
from kvtierd.tiers.store.collector import Collected, Collector
from kvtierd.tiers.store.drivers import open_driver
from kvtierd.tiers.store.guarded import GuardedStore
from kvtierd.tiers.store.objects import StoreError

EXIT_INCOMPLETE = 75
"""The exit status if something was left to a later run (sysexits.h EX_TEMPFAIL)."""
SAID_MAX = 10
"""So many failures are said."""


def collect_once(store: StoreConfig, older_s: float, *, dry_run: bool, quiet: bool) -> Collected:
    """Goes through the whole store once. Raises Refusal if the store cannot be opened."""
    driver = open_driver(store.url, dict(store.options), store.deadline_s)
    opened = GuardedStore(driver, store.deadline_s, _stuck)
    coder = Coder(Compression(store.compression))
    return asyncio.run(_run(opened, coder, older_s, dry_run=dry_run, quiet=quiet))


async def _run(store: GuardedStore, coder: Coder, older_s: float, *, dry_run: bool, quiet: bool) -> Collected:
    def progress(so_far: Collected) -> None:
        if not quiet:
            click.echo(f"{so_far.packs:,} packs of {so_far.namespaces:,} namespaces looked at", err=True)

    collector = Collector(store, older_s=older_s, dry_run=dry_run, coder=coder, progress=progress)
    try:
        return await collector.run()
    except StoreError as error:
        collector.collected.failures.append(str(error))
        return collector.collected
    finally:
        await store.close()


def _stuck() -> None:
    click.echo("kvtierd: a call of the store's driver goes on although it was cancelled", err=True)
    os._exit(EXIT_INCOMPLETE)


def leave(status: int) -> NoReturn:
    """Ends the process at once, as a store's worker does: a driver may have threads of its own, and those of
    obstore sometimes abort the process if they are still there when the interpreter goes."""
    sys.stdout.flush()
    os._exit(status)


def as_text(collected: Collected, *, dry_run: bool) -> str:
    """What a run has done, in sentences."""
    would = "would be " if dry_run else ""
    lines = [
        f"{collected.packs:,} packs of {collected.namespaces:,} namespaces, "
        f"{human_size(collected.pack_bytes)}",
        f"{collected.superseded_packs:,} packs {would}removed, because newer packs have their blocks",
        f"{collected.joined_packs:,} small packs {would}joined into {collected.larger_packs:,} larger ones",
        f"{human_size(collected.removed_bytes)} {would}removed in all",
    ]
    if collected.notes_removed:
        lines.append(f"{collected.notes_removed:,} old notes {would}removed")
    if collected.unreadable_packs:
        lines.append(f"{collected.unreadable_packs:,} packs cannot be read, and stay as they are")
    if collected.doubted_blocks:
        lines.append(
            f"{collected.doubted_blocks:,} blocks have bytes that do not fit; what else has them has stayed"
        )
    lines += [f"left to a later run: {failure}" for failure in collected.failures[:SAID_MAX]]
    if (more := len(collected.failures) - SAID_MAX) > 0:
        lines.append(f"left to a later run: {more:,} other things")
    return "\n".join(lines)
