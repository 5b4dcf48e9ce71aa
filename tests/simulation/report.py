"""What a simulation has met: every pair of the transition table, every fault in every state it can strike
in."""

from __future__ import annotations

from collections import Counter

from kvtierd.core.maintenance.explain import BlockVerdict
from kvtierd.core.state.transitions import TABLE, Event, State

from tests.simulation.world import World

WAYS = ("store", "load")
STRUCK_TRANSFERS = ("engine dies", "cancel", "worker lost", "takes memory back", "deadline")
WANTED_FAULTS = (
    *(
        (fault, f"{way} {state}")
        for fault in STRUCK_TRANSFERS
        for way in WAYS
        for state in ("ACTIVE", "CLOSING")
    ),
    ("engine dies", "FORMING"),
    ("engine dies", "LIVE"),
    ("client revokes", "armed"),
    ("client revokes", "word in state 1"),
    ("client revokes", "word in state 2"),
    ("client revokes", "word in state 3"),
    ("client revokes", "word in state 4"),
    ("gate never rings", "engine lives"),
    ("gate never rings", "engine ended"),
    ("copy fails", "store"),
    ("copy fails", "load"),
    ("worker lost", "mapping MAPPED"),
    ("worker lost", "mapping RELEASING"),
    ("worker lost", "part waiting"),
    ("worker lost", "part started"),
    ("worker lost", "part finished, not told"),
    ("worker exits", "without being lost"),
    ("worker exits", "while copying"),
    ("worker exits", "not copying"),
    ("late message", "PartFinished told again"),
    ("late message", "SessionReleased told again"),
    ("late message", "PartFinished from a lost worker"),
    ("late message", "SessionReleased from a lost worker"),
    ("late message", "PartFinished after its session's release"),
    ("part is silent", "session released"),
    ("takes memory back", "FORMING"),
    ("takes memory back", "LIVE"),
    ("record rots", "READY"),
    ("data rots", "while the daemon is down"),
    ("data rots", "while every load is verified"),
    ("check", "slot given away meanwhile"),
    ("check", "lanes busy"),
    ("sample finds", "corrupt block"),
    ("sample finds", "condemned block"),
    ("sample finds", "block that has gone"),
    ("late message", "SlotsChecked told again"),
    ("late message", "SlotsChecked from a lost worker"),
    ("cold start", "too many corrupt slots"),
    ("drain", "transfers open"),
    ("drain", "idle"),
    ("drain", "resumed"),
    ("daemon restart", "between stimuli"),
    ("daemon restart", "in the middle of actions"),
    ("writers proven gone", "some"),
    ("writers proven gone", "all"),
    ("time jumps", "60 s, leases held"),
    *(("disk fails", kind) for kind in ("READ", "WRITE", "CHECK")),
    *(("disk worker lost", state) for state in ("LIVE", "FAILING")),
    *(
        ("disk worker lost", f"{kind} {phase}")
        for kind in ("READ", "WRITE")
        for phase in ("waiting", "started", "finished, not told")
    ),
    ("disk worker exits", "with jobs"),
    ("disk hangs", "True"),
    ("disk rots", "READY"),
    ("power is lost", "disk"),
    ("disk recovered", "before the pool"),
    ("scrub", "begun"),
    ("late message", "DiskJobFinished told again"),
    ("late message", "DiskJobFinished from a lost worker"),
)
WANTED_OUTCOMES = (
    *(f"{way} {end}" for way in WAYS for end in ("DONE", "FAILED", "CANCELLED")),
    "store throttled",
    "blocks promoted",
    "blocks evicted before a disk had them",
    "blocks corrupt on a disk",
    "blocks written to a disk",
    "blocks evicted from a disk",
    "extents of a disk reclaimed",
    "late promotion is a miss",
    "on a disk, pending",
    "on a disk, no room",
    "blocks cleared",
    "lease on fewer blocks than readable",
    "lease on none of them",
    "several groups hit",
    "a window hits",
    "a joint prefix will be longer",
    "held when cleared",
    "under way when cleared",
    *(f"explained {verdict.value}" for verdict in BlockVerdict if verdict is not BlockVerdict.ELSEWHERE),
)


class Coverage:
    """Sums over worlds."""

    def __init__(self) -> None:
        self.stimuli = 0
        self.worlds = 0
        self.transitions: Counter[tuple[State, Event]] = Counter(dict.fromkeys(TABLE, 0))
        self.faults: Counter[tuple[str, str]] = Counter(dict.fromkeys(WANTED_FAULTS, 0))
        self.outcomes: Counter[str] = Counter(dict.fromkeys(WANTED_OUTCOMES, 0))
        self.refusals: Counter[str] = Counter()

    def add(self, world: World) -> None:
        self.worlds += 1
        self.stimuli += world.stimuli
        world.count_up()
        self.transitions.update(world.transitions)
        self.faults.update(world.faults)
        self.outcomes.update(world.outcomes)
        self.refusals.update(world.refusals)

    def missing(self) -> list[str]:
        """What has to happen in a long run and has not."""
        pairs = [
            f"{state!r} on {event.name}" for (state, event), count in self.transitions.items() if not count
        ]
        faults = [f"{fault}: {struck}" for (fault, struck), count in self.faults.items() if not count]
        return pairs + faults + [name for name, count in self.outcomes.items() if not count]

    def text(self) -> str:
        lines = [f"{self.worlds} worlds", "transitions:"]
        for (state, event), count in self.transitions.items():
            lines.append(f"  {count:>8}  {state!r} on {event.name} → {TABLE[state, event].name}")
        lines.append("faults, by what they struck:")
        for (fault, struck), count in sorted(self.faults.items()):
            lines.append(f"  {count:>8}  {fault}: {struck}")
        for title, counts in (("transfers:", self.outcomes), ("refusals:", self.refusals)):
            lines.append(title)
            lines += [f"  {count:>8}  {name}" for name, count in sorted(counts.items())]
        return "\n".join(lines)
