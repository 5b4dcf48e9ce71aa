"""Hundreds of thousands of bad requests, from their bytes on, between right ones that go on working: each is
refused for the reason that fits, and nothing of it remains."""

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtier.v1 import cache_pb2
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.maintenance.explain import Explained

from tests.faults.bad_requests.front import LIMITS, Front
from tests.faults.bad_requests.guest import Guest, Kind
from tests.faults.bad_requests.wrong_calls import WrongCalls
from tests.faults.bad_requests.wrong_hellos import wrong_hello
from tests.faults.bad_requests.wrong_places import is_refused, places, spoil
from tests.faults.bad_requests.wrong_stimuli import wrong_stimulus
from tests.support.leaks import SHM
from tests.support.length import rounds

REQUESTS = rounds(20_000, 1_000_000)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
RUN = 400
"""Bad requests, one after another."""
RIGHT = 4
"""Right ones after them, each of several calls."""
MOVE_EVERY = 23
"""Runs between the ends of the guest that comes and goes."""
KINDS = (
    Kind("alone", ((2_048, 2_048), (4_608,))),
    Kind("pair", ((4_096, 1_000),), world=2, apart=True, hash_bytes=20),
    Kind("nomad", ((4_096,),), hash_bytes=8),
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300 + REQUESTS // 500)]


class Campaign:
    """One front, three guests, and everything wrong that can be asked."""

    def __init__(self, front: Front, chance: random.Random, count: Counter[str]) -> None:
        self.front = front
        self.chance = chance
        self.count = count
        self.whys: Counter[str] = Counter()
        self.guests = [Guest(front, kind, chance, count) for kind in KINDS]
        self.forming = Guest(front, Kind("forming", ((4_096,),), world=2, apart=True), chance, count)
        self.calls = [
            WrongCalls(guest, [other for other in self.guests if other is not guest], chance)
            for guest in self.guests
        ]

    async def attach(self) -> None:
        for guest in self.guests:
            await guest.attach()
        self.forming.attach_one(-1)
        self.visitor = self.front.open()

    def refused(self, reason: Reason, reasons: tuple[Reason, ...], what: str) -> None:
        assert reason in reasons, f"{what} was refused with {reason.name}; expected {reasons}"
        self.whys[what] += 1
        self.count["bad_requests_in_process"] += 1

    async def call(self, number: int) -> None:
        wrong = self.calls[number % len(self.calls)].make()
        before = self.front.glance()
        try:
            reply = self.front.ask(wrong.call, wrong.data)
            if wrong.call == "wait":
                await reply
        except Refusal as refusal:
            self.refused(refusal.reason, wrong.reasons, f"{wrong.call} {wrong.what}")
        else:
            raise AssertionError(f"accepted: {wrong}: {reply}")
        assert self.front.glance() == before, f"{wrong} changed something"

    def not_attached(self) -> None:
        """Of a session without Hello, and of an instance that is not complete."""
        request = self.guests[0].store_request(0, [bytes(32)], 0)
        for session, reasons in (
            (self.visitor, (Reason.NOT_ATTACHED,)),
            (self.forming.scheduler, (Reason.INSTANCE_INCOMPLETE, Reason.WRONG_EPOCH)),
        ):
            request.session.token = session.token
            request.session.epoch = session.epoch or 1
            try:
                self.front.ask("store", request.SerializeToString())
            except Refusal as refusal:
                self.refused(refusal.reason, reasons, "not ready")
            else:
                raise AssertionError(f"accepted: {request}")

    def hello(self) -> None:
        guest = self.chance.choice(self.guests)
        attached = self.chance.random() < 0.1
        token = guest.scheduler.token if attached else self.visitor.token
        hello, reasons = wrong_hello(guest, token, self.chance)
        if attached and Reason.UNKNOWN_TOKEN not in reasons:
            hello, reasons = guest.hello(guest.kind.processes[0], token), (Reason.SECOND_HELLO,)
        try:
            self.front.hello(hello, lambda _: None)
        except Refusal as refusal:
            self.refused(refusal.reason, reasons, "hello")
        else:
            raise AssertionError(f"accepted: {hello}")

    def stimulus(self) -> None:
        stimulus, reasons = wrong_stimulus(self.chance.choice(self.guests), self.chance)
        try:
            self.front.cache.handle(stimulus)
        except Refusal as refusal:
            self.refused(refusal.reason, reasons, type(stimulus).__name__)
        else:
            raise AssertionError(f"accepted: {stimulus}")

    def place(self) -> None:
        guest = self.chance.choice(self.guests)
        request = places(guest.ranks[0])
        assert not is_refused(request.SerializeToString(), guest.ranks[0], guest.geometry)
        spoil(request, self.chance)
        if is_refused(request.SerializeToString(), guest.ranks[0], guest.geometry):
            self.refused(Reason.MAPPING_INVALID, (Reason.MAPPING_INVALID,), "place")

    def explain(self) -> None:
        key = self.chance.randbytes(self.chance.choice((0, 1, 7, 33, 64)))
        try:
            found = self.front.cache.explain(key, self.chance.choice(("", "zz", "00")), None, None)
        except Refusal as refusal:
            self.refused(refusal.reason, (Reason.HASH_LENGTH, Reason.NAMESPACE_INVALID), "explain")
        else:
            assert isinstance(found, Explained)

    async def run(self) -> None:
        """A run of bad requests, in which the loop turns not once: nothing else can change anything."""
        before = self.front.picture()
        for number in range(RUN):
            dice = self.chance.random()
            if dice < 0.75:
                await self.call(number)
            elif dice < 0.87:
                self.stimulus()
            elif dice < 0.93:
                self.hello()
            elif dice < 0.98:
                self.place()
            elif dice < 0.99:
                self.not_attached()
            else:
                self.explain()
        assert self.front.picture() == before, "a refused request left a trace"
        assert not self.front.cache.poisoned.is_set()

    async def something_right(self) -> None:
        guest = self.chance.choice(self.guests)
        match self.chance.randrange(7):
            case 0 if guest.gated:
                await guest.let_go()
            case 1 | 2 if len(guest.gated) < LIMITS.transfers_max:
                guest.hold()
            case 3:
                guest.release()
            case 4 if len(guest.gated) < LIMITS.transfers_max:
                await guest.load()
        group = guest.some_group()
        mode = self.chance.choice((cache_pb2.LOOKUP_MODE_PREFIX, cache_pb2.LOOKUP_MODE_EXACT))
        guest.lease(group, guest.some_hashes(group), mode)
        if len(guest.gated) < LIMITS.transfers_max:
            await guest.store()

    async def move(self) -> None:
        """One guest goes and comes again: its tokens, epochs and leases of before are worth nothing."""
        nomad = self.guests[-1]
        await nomad.leave(Refusal(Reason.EPOCH_ENDED, "it moves"))
        await nomad.attach()
        self.count["valid_requests"] += 1

    async def until(self, requests: int) -> None:
        runs = 0
        while self.count["bad_requests_in_process"] < requests:
            await self.run()
            for _ in range(RIGHT):
                await self.something_right()
            runs += 1
            if runs % MOVE_EVERY == 0:
                await self.move()
        for guest in self.guests:
            await guest.check_everything()


def descriptors() -> Counter[str]:
    """What this process has open, by kind, without what earlier tests have left to be collected."""
    gc.collect()
    kinds: Counter[str] = Counter()
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            kinds[os.readlink(entry).split(":")[0]] += 1
        except FileNotFoundError:
            pass
    return kinds


async def test_no_bad_request_is_taken_and_none_leaves_a_trace(
    shm_dir: Path, proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {REQUESTS} requests")
    assert shm_dir.parent == SHM
    asyncio.get_running_loop().slow_callback_duration = 3_600
    front = await Front(shm_dir / "pool").start()
    before = descriptors()
    campaign = Campaign(front, random.Random(SEED), count)
    try:
        await campaign.attach()
        await campaign.until(REQUESTS)
        for guest in (*campaign.guests, campaign.forming):
            await guest.leave(Refusal(Reason.EPOCH_ENDED, "the test ends"))
        front.connections.end(campaign.visitor, Refusal(Reason.EPOCH_ENDED, "the test ends"))
        core = front.machine.core
        assert not any((core.leases, core.transfers, core.parts, core.instances, core.sessions))
        assert len(front.connections) == 0
        assert descriptors() == before
        front.picture()
    finally:
        await front.close()
    kinds = len(campaign.whys)
    assert kinds > 30, campaign.whys
    proved(
        f"{count['bad_requests_in_process']:,} bad requests of {kinds} kinds at the façade between"
        f" {count['valid_requests']:,} right ones: all refused for the right reason, nothing changed,"
        f" {count['blocks_compared']:,} blocks compared, {count['wrong_bytes']} wrong bytes"
        f" (KVTIER_SEED={SEED})"
    )
