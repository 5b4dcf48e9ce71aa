"""The contract of stores, for whoever writes a driver: each of CHECKS proves one promise of `ObjectStore`.

With pytest, for example:

    @pytest.mark.parametrize("check", contract.CHECKS, ids=contract.title)
    def test_it_keeps_the_contract(check, tmp_path):
        contract.run(check, open_store, f"sqlite://{tmp_path}/blocks.db")

The checks need no pytest, and say themselves which promise is broken. They put objects below a name of their
own, of 100 MiB together, and remove nothing: give them a place that is thrown away.
"""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeVar

from kvtierd.tiers.store.guarded import GuardedStore
from kvtierd.tiers.store.objects import ObjectStore, OpenStore, StoreError, StoreTrouble

DEADLINE_S: Final = 60.0
"""For each call. A driver that needs more of it than a few percent is too slow to be of use."""
METHODS: Final = ("put", "read", "read_ranges", "list", "delete", "close")
MIB: Final = 1 << 20
Result = TypeVar("Result")


class BrokenPromiseError(AssertionError):
    """A driver does not do what `ObjectStore` promises. The text says which promise that is."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """A store as two hosts have it, each by a driver of its own."""

    one: ObjectStore
    other: ObjectStore
    bare: ObjectStore
    """The first one, without what guards the daemon against it."""
    prefix: str
    """Where the check puts its objects; it ends with a slash."""
    put_and_die: Callable[[str, bytes], None]
    """Puts an object from a process that is killed as soon as `put` has returned."""


Check = Callable[[Hosts], Coroutine[Any, Any, None]]


def title(check: Check) -> str:
    """The name of a check, for pytest's `ids`."""
    return check.__name__


def run(
    check: Check,
    open_store: OpenStore,
    url: str,
    options: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Runs one of CHECKS on stores that `open_store` opens, a function of a module that can be imported.

    Raises BrokenPromiseError, and StoreError where a call fails that should not.
    """
    given = dict(options or {})
    bare, other = (_opened(open_store, url, given, deadline_s) for _ in range(2))
    asyncio.run(_run(check, bare, other, deadline_s, _killer(open_store, url, given, deadline_s)))


def _opened(open_store: OpenStore, url: str, options: Mapping[str, str], deadline_s: float) -> ObjectStore:
    store = open_store(url, options, deadline_s)
    missing = [name for name in METHODS if not hasattr(store, name)]
    promise(not missing, f"a store has all methods of ObjectStore, and {missing} are missing")
    return store


async def _run(
    check: Check,
    bare: ObjectStore,
    other: ObjectStore,
    deadline_s: float,
    put_and_die: Callable[[str, bytes], None],
) -> None:
    stuck: list[None] = []

    def is_stuck() -> None:
        stuck.append(None)

    one, another = (GuardedStore(store, deadline_s, is_stuck) for store in (bare, other))
    try:
        await check(Hosts(one, another, bare, f"contract-{secrets.token_hex(4)}/", put_and_die))
    finally:
        await one.close()
        await another.close()
    promise(not stuck, "a call that is cancelled ends at once")


def promise(kept: bool, what: str) -> None:
    """Raises BrokenPromiseError unless a promise was kept. `what` is the promise."""
    if not kept:
        raise BrokenPromiseError(f"not so: {what}")


async def trouble_of(call: Awaitable[object]) -> StoreTrouble | None:
    """Why a call failed; None if it did not."""
    try:
        await call
    except StoreError as error:
        return error.trouble
    return None


async def an_object_comes_back_whole_and_in_pieces(hosts: Hosts) -> None:
    name, data = f"{hosts.prefix}one", bytes(range(256)) * (8 * MIB // 256)
    made = await hosts.one.put(name, _parts(data[:100], data[100:5_000], b"", data[5_000:]))
    promise(made, "put returns True if it has made the object")
    whole = await hosts.one.read(name, 0, len(data))
    promise((whole.data, whole.object_bytes) == (data, len(data)), "read returns what put was given")
    part = await hosts.one.read(name, 300, 50)
    promise(part.data == data[300:350], "read begins where it is told to, and ends after so many bytes")
    promise(part.object_bytes == len(data), "read tells the length of the whole object")
    end = await hosts.one.read(name, len(data) - 10, 50)
    promise(end.data == data[-10:], "read returns what there is if the object ends before")
    ranges = [(len(data) - 1, 1), (4_096, 70_000), (6 * MIB, 4_096), (5_000, 100), (0, 1), (1, 1)]
    found = await hosts.one.read_ranges(name, ranges)
    for (begin, size), piece in zip(ranges, found, strict=True):
        promise(piece == data[begin : begin + size], "read_ranges returns each range, in the order asked for")
    promise(await hosts.one.put(f"{hosts.prefix}empty", []), "an object may have no bytes")
    promise((await hosts.one.list(f"{hosts.prefix}"))[0].size_bytes == 0, "an object may have no bytes")


async def an_object_is_made_once(hosts: Hosts) -> None:
    name = f"{hosts.prefix}one"
    stores = [hosts.one, hosts.other] * 4
    made = await asyncio.gather(
        *(store.put(name, _parts(b"%d" % number)) for number, store in enumerate(stores))
    )
    promise(made.count(True) == 1, "of several puts of one name, from several hosts, one returns True")
    winner = b"%d" % made.index(True)
    promise((await hosts.one.read(name, 0, 8)).data == winner, "the object is that of the put that made it")
    promise(not await hosts.other.put(name, _parts(b"another")), "put returns False if there is one already")
    promise((await hosts.one.read(name, 0, 8)).data == winner, "put changes no object that there is")


async def what_is_not_there_is_missing(hosts: Hosts) -> None:
    store, prefix = hosts.one, hosts.prefix
    missing = StoreTrouble.MISSING
    promise(await trouble_of(store.read(f"{prefix}none", 0, 1)) is missing, "read of no object is MISSING")
    promise(
        await trouble_of(store.read_ranges(f"{prefix}none", [(0, 8)])) is missing,
        "read_ranges of no object is MISSING",
    )
    await store.put(f"{prefix}short", _parts(b"1234567"))
    for ranges in ([(0, 8)], [(50, 8)], [(0, 2), (5, 3)]):
        promise(
            await trouble_of(store.read_ranges(f"{prefix}short", ranges)) is missing,
            "read_ranges is MISSING if the object ends before what was asked for",
        )
    promise(await store.list(f"{prefix}nothing/") == [], "list of a prefix that nothing has is empty")


async def objects_are_listed_in_the_order_of_their_names(hosts: Hosts) -> None:
    store, prefix = hosts.one, hosts.prefix
    names = sorted(f"{prefix}{number:04}-a.b_C/{'x' * 120}" for number in range(40))
    for name in reversed(names):
        await store.put(name, _parts(name.encode()))
    for beside in (f"{prefix[:-1]}-beside/0000", f"{prefix[:-1]}0"):
        await store.put(beside, _parts(b"of another prefix"))
    listed = await store.list(prefix)
    promise(
        [each.name for each in listed] == names, "list returns all below the prefix, by name, and no others"
    )
    promise({each.size_bytes for each in listed} == {len(names[0])}, "list tells the sizes of objects")
    promise(all(each.modified_s > 1e9 for each in listed), "list tells when objects were written, in seconds")
    some = await store.list(prefix, names[9], 5)
    promise(
        [each.name for each in some] == names[10:15], "list begins behind `after`, and ends after `limit`"
    )
    promise(await store.list(prefix, names[-1]) == [], "nothing comes after the last name")
    between = await store.list(prefix, f"{prefix}0009-b", 1)
    promise([each.name for each in between] == [names[10]], "`after` need not be the name of an object")


async def a_listing_goes_on_where_the_last_one_ended(hosts: Hosts) -> None:
    names = [f"{hosts.prefix}{number:05}" for number in range(1_100)]
    for first in range(0, len(names), 50):
        await asyncio.gather(*(hosts.one.put(name, _parts(b"x")) for name in names[first : first + 50]))
    found = [each.name for each in await hosts.other.list(hosts.prefix)]
    promise(found == names[:1_000], "list returns 1,000 objects if there are more")
    found += [each.name for each in await hosts.other.list(hosts.prefix, found[-1])]
    promise(found == names, "two listings, the second from where the first ended, have every object once")


async def what_one_host_puts_another_has_at_once(hosts: Hosts) -> None:
    for number in range(20):
        name = f"{hosts.prefix}{number:04}"
        await hosts.one.put(name, _parts(b"%d" % number))
        listed = [each.name for each in await hosts.other.list(hosts.prefix)]
        promise(name in listed, "what was put before a listing, by whichever host, is in it")
        read = await hosts.other.read(name, 0, 10)
        promise(read.data == b"%d" % number, "what one host has put, another reads")


async def what_was_deleted_has_gone_and_nothing_else(hosts: Hosts) -> None:
    names = [f"{hosts.prefix}{number:04}" for number in range(3)]
    for name in names:
        await hosts.one.put(name, _parts(name.encode()))
    await hosts.other.delete(names[1])
    promise(
        await trouble_of(hosts.one.read(names[1], 0, 8)) is StoreTrouble.MISSING,
        "what one host has deleted is MISSING for every host",
    )
    listed = [each.name for each in await hosts.one.list(hosts.prefix)]
    promise(listed == [names[0], names[2]], "what was deleted is not listed, and everything else is")
    await hosts.one.delete(names[1])
    await hosts.one.delete(f"{hosts.prefix}never")
    made = await hosts.one.put(names[1], _parts(b"again"))
    promise(made, "a name whose object was deleted can be put again")
    promise((await hosts.other.read(names[1], 0, 8)).data == b"again", "what is put then is what is read")


async def an_object_is_there_whole_or_not_at_all(hosts: Hosts) -> None:
    data = os.urandom(MIB) * 8
    names = [f"{hosts.prefix}{number:04}" for number in range(3)]

    async def put_all() -> None:
        for name in names:
            await hosts.one.put(name, _parts(data))

    async def look() -> None:
        for each in await hosts.other.list(hosts.prefix):
            promise(each.size_bytes == len(data), "list tells of no object that is half written")
        for name in names:
            with suppress(StoreError):
                whole = await hosts.other.read(name, 0, len(data))
                promise(whole.data == data, "nobody reads an object that is half written")

    putting = asyncio.create_task(put_all())
    while not putting.done():
        await look()
        await asyncio.sleep(0)
    await putting
    await look()
    promise(len(await hosts.other.list(hosts.prefix)) == len(names), "list tells of all objects")


async def a_put_that_is_cancelled_leaves_no_half_object(hosts: Hosts) -> None:
    data = os.urandom(MIB) * 4
    names = [f"{hosts.prefix}{number:04}" for number in range(12)]
    for turns, name in enumerate(names):
        putting = asyncio.create_task(hosts.one.put(name, _parts(data)))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        putting.cancel()
        with suppress(asyncio.CancelledError):
            await putting
    for each in await hosts.other.list(hosts.prefix):
        whole = await hosts.other.read(each.name, 0, len(data) + 1)
        promise(whole.data == data, "a put that is cancelled leaves nothing, or the whole object")
    promise(await hosts.one.put(f"{hosts.prefix}after", _parts(b"x")), "puts go on after one was cancelled")


async def many_calls_at_once_do_not_disturb_each_other(hosts: Hosts) -> None:
    contents = {f"{hosts.prefix}{number:04}": os.urandom(100_000 + number) for number in range(32)}

    async def whole(name: str, data: bytes) -> None:
        promise(await hosts.one.put(name, _parts(data[:50], data[50:])), "each of many puts makes its object")
        halves = [(0, 50_000), (50_000, len(data) - 50_000)]
        first, second = await hosts.one.read_ranges(name, halves)
        promise(bytes(first) + bytes(second) == data, "each of many calls gets the bytes of its own object")

    await asyncio.gather(*(whole(name, data) for name, data in contents.items()))


async def calls_do_not_hold_up_the_event_loop(hosts: Hosts) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def goes_on_during(call: Coroutine[Any, Any, Result], what: str) -> Result:
        before = turns
        result = await call
        promise(turns > before, f"{what} lets the event loop go on while it waits")
        return result

    counting = asyncio.create_task(count())
    name, data = f"{hosts.prefix}one", bytes(MIB)
    try:
        await goes_on_during(hosts.bare.put(name, _parts(data)), "put")
        await goes_on_during(hosts.bare.read(name, 0, len(data)), "read")
        await goes_on_during(hosts.bare.read_ranges(name, [(0, len(data))]), "read_ranges")
        await goes_on_during(hosts.bare.list(hosts.prefix), "list")
        await hosts.bare.put(f"{hosts.prefix}other", _parts(data))
        await goes_on_during(hosts.bare.delete(f"{hosts.prefix}other"), "delete")
    finally:
        counting.cancel()


async def what_was_put_survives_the_process(hosts: Hosts) -> None:
    data = os.urandom(100_000)
    hosts.put_and_die(f"{hosts.prefix}kept", data)
    kept = await hosts.one.read(f"{hosts.prefix}kept", 0, len(data))
    promise(kept.data == data, "what put has returned for is there, whatever happens to the process then")


CHECKS: Final[Sequence[Check]] = (
    an_object_comes_back_whole_and_in_pieces,
    an_object_is_made_once,
    what_is_not_there_is_missing,
    objects_are_listed_in_the_order_of_their_names,
    a_listing_goes_on_where_the_last_one_ended,
    what_one_host_puts_another_has_at_once,
    what_was_deleted_has_gone_and_nothing_else,
    an_object_is_there_whole_or_not_at_all,
    a_put_that_is_cancelled_leaves_no_half_object,
    many_calls_at_once_do_not_disturb_each_other,
    calls_do_not_hold_up_the_event_loop,
    what_was_put_survives_the_process,
)


def _parts(*pieces: bytes) -> list[memoryview]:
    return [memoryview(each) for each in pieces]


# --- a process that is killed ---


def _killer(
    open_store: OpenStore, url: str, options: Mapping[str, str], deadline_s: float
) -> Callable[[str, bytes], None]:
    module, function = getattr(open_store, "__module__", ""), getattr(open_store, "__qualname__", "")

    def put_and_die(name: str, data: bytes) -> None:
        told = {
            "path": sys.path,
            "driver": [module, function],
            "url": url,
            "options": dict(options),
            "deadline_s": deadline_s,
            "name": name,
            "data": data.hex(),
        }
        ended = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(told).encode(),
            capture_output=True,
            timeout=2 * deadline_s,
            check=False,
        )
        said = ended.stderr.decode(errors="replace")[-2_000:]
        promise(ended.returncode == -signal.SIGKILL, f"another process can use the driver; it said: {said}")

    return put_and_die


def _put_and_die() -> None:
    told = json.loads(sys.stdin.buffer.read())
    sys.path[:] = told["path"]
    module, function = told["driver"]
    open_store: OpenStore = getattr(import_module(module), function)
    store = open_store(told["url"], told["options"], told["deadline_s"])

    async def put() -> None:
        promise(await store.put(told["name"], _parts(bytes.fromhex(told["data"]))), "put makes an object")
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(put())


if __name__ == "__main__":
    _put_and_die()
