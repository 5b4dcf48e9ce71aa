"""The composition root: opens what the daemon needs, starts the workers, builds the daemon and runs it."""

import asyncio
import importlib
import signal
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack

import uvloop

from kvtierd.cli.interrupts import Noted
from kvtierd.config.daemon import Config, Loaded
from kvtierd.config.descriptors import descriptors_wanted, shares_within
from kvtierd.preflight import require
from kvtierd.rpc.peers import PeerRules
from kvtierd.rpc.sockets import OwnedSockets
from kvtierd.service.notify import EXTENSION_S, Notifier
from kvtierd.service.opening import (
    Opened,
    group_id,
    make_workers,
    open_images,
    open_pool,
    want_descriptors,
    writable_tenants,
)
from kvtierd.workers.supervisor.supervisor import WorkerStimulus


def run(loaded: Loaded, read_again: Callable[[], Config]) -> int:
    """Serves until SIGTERM, SIGINT or an internal error. Returns the exit status.

    `read_again()` reads the configuration as it is now, for a reload. It may raise ConfigError.

    Raises NotReadyError, with every reason, before anything is made; ConfigError, SocketError, PoolError or
    WorkerStartError if the daemon cannot start for another reason; StoppedEarly after a signal. Leaves
    nothing behind then.
    """
    require(loaded)
    # What the daemon is built of is imported in a thread. Meanwhile this one opens the pool, which keeps the
    # kernel and native code busy, and starts the workers, which have imports of their own.
    threading.Thread(target=importlib.import_module, args=("kvtierd.service.daemon",), name="imports").start()
    stop = Noted(signal.SIGINT, signal.SIGTERM)
    config = loaded.config
    shares = shares_within(config, want_descriptors(descriptors_wanted(config)))
    with ExitStack() as stack:
        notifier = Notifier()
        stack.callback(notifier.close)
        notifier.starting("Opening the pool", EXTENSION_S)
        server = config.server
        gid = group_id(server.group)
        rules = PeerRules(gid, server.tenants, server.operators)
        sockets = OwnedSockets(server.socket_path, server.side_socket_path, server.lock_path, gid)
        stack.callback(sockets.release)
        pool = open_pool(config, notifier, stop.check)
        stack.callback(pool.close)
        images = []
        for image in open_images(config):
            stack.callback(image.close)
            images.append(image)
        writable = writable_tenants(config) if config.disk.paths else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            opened = Opened(sockets, pool, tuple(images), writable, rules, shares)
            return runner.run(_serve(loaded, read_again, stop, notifier, opened))


async def _serve(
    loaded: Loaded, read_again: Callable[[], Config], early: Noted, notifier: Notifier, opened: Opened
) -> int:
    """Starts the workers, and with them the daemon. Returns the exit status."""

    def tell(stimulus: WorkerStimulus) -> None:
        daemon.worker_event(stimulus)

    async with AsyncExitStack() as stack:
        workers = make_workers(loaded.config, opened.pool, opened.images, tell)
        stack.push_async_callback(workers.lives.stop, 0)
        notifier.starting("Starting the copy workers", EXTENSION_S)
        starting = asyncio.create_task(workers.start(), name="workers")
        stack.callback(starting.cancel)
        await asyncio.sleep(0)  # now their processes are there, and report nothing before the loop goes on
        from kvtierd.service.daemon import Daemon  # waits for the thread that imports it

        daemon = Daemon(loaded, read_again, early, notifier, opened, workers, starting, stack)
        return await daemon.run()
