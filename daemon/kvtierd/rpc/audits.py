"""What the log says when an engine has found that its namespace holds blocks that differ from what it
computes."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvtierd.core.blocks.namespaces import fields_fingerprint
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.stimuli import AuditReport
from kvtierd.logs import logger
from kvtierd.rpc.hello import Greeting

NAMESPACES_MAX = 64
ENGINES_MAX = 8
"""Engines remembered for each namespace, the latest that were started differently. With what a Hello may say,
all of them take 16 MiB at most."""
DIFFERENCES_MAX = 16
TOLD_CHARACTERS_MAX = 4_096
"""Characters about a namespace, and about what differs, in one line of the log."""
TELL_EVERY_S = 10.0

log = logger(__name__)

Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Engine:
    client: str
    configuration: Settings


class EnginesMet:
    """Who has used which namespace since the daemon started, and with which settings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = -TELL_EVERY_S
        self._met: OrderedDict[tuple[str, bytes], OrderedDict[_Engine, str]] = OrderedDict()
        """For a tenant and the fingerprint of a namespace's fields: its engines, and the latest instance of
        each."""

    def add(self, greeting: Greeting) -> None:
        """Remembers a scheduler that has attached."""
        namespace = _namespace(greeting)
        engines = self._met.setdefault(namespace, OrderedDict())
        self._met.move_to_end(namespace)
        engine = _Engine(greeting.client, greeting.configuration)
        engines[engine] = greeting.attach.instance
        engines.move_to_end(engine)
        if len(engines) > ENGINES_MAX:
            engines.popitem(last=False)
        if len(self._met) > NAMESPACES_MAX:
            self._met.popitem(last=False)

    def tell(self, greeting: Greeting, reports: Iterable[AuditReport]) -> None:
        """Logs mismatches, at most one every `TELL_EVERY_S`. The core counts all of them."""
        for report in reports:
            if report.matched or self._clock() - self._told_s < TELL_EVERY_S:
                continue
            self._told_s = self._clock()
            log.error(
                "an audit found a block that is not what this engine computes: the engine loads and stores "
                "nothing more in this namespace. Its outputs may have been wrong, and so may those of others "
                "that share with it; see docs/operate.md",
                instance=greeting.attach.instance,
                client=greeting.client,
                error=round(report.error, 6),
                threshold=report.threshold,
                group=report.group,
                block=report.block_hash.hex()[:16],
                detail=report.detail,
                namespace=_joined(f"{name}={value}" for name, value in greeting.attach.namespace_facts),
                others=_joined(self._others(greeting)) or "no other engine has been here since the start",
            )

    def _others(self, greeting: Greeting) -> Iterator[str]:
        mine = _Engine(greeting.client, greeting.configuration)
        for other, instance in self._met.get(_namespace(greeting), {}).items():
            if other != mine:
                yield f"{instance} ({other.client}): " + (", ".join(_differences(mine, other)) or "set alike")


def _namespace(greeting: Greeting) -> tuple[str, bytes]:
    attach = greeting.attach
    return attach.owner.tenant, fields_fingerprint(attach.namespace_fields)


def _joined(parts: Iterable[str]) -> str:
    text = "; ".join(parts)
    return text if len(text) <= TOLD_CHARACTERS_MAX else text[:TOLD_CHARACTERS_MAX] + "…"


def _differences(mine: _Engine, other: _Engine) -> list[str]:
    here, there = dict(mine.configuration), dict(other.configuration)
    names = [name for name in here | there if here.get(name) != there.get(name)]
    return [
        f"{name} is {_shown(there, name)} there and {_shown(here, name)} here"
        for name in names[:DIFFERENCES_MAX]
    ]


def _shown(settings: dict[str, str], name: str) -> str:
    return f"{settings[name]!r:.80}" if name in settings else "the default"


def refuse_of_ranks(schedules: bool, reports: Iterable[AuditReport]) -> None:
    """Raises Refusal ROLE for audits of a session that does not schedule."""
    if not schedules and any(True for _ in reports):
        raise Refusal(Reason.ROLE, "audits are told by the scheduler's session", field="audits")
