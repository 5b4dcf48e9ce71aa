"""The thread of a store's worker: one event loop, in which all jobs run, and reports them."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvtierd.core.actions import DiskJobKind
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import BlockingPacketChannel, ChannelEndedError
from kvtierd.workers.channel.status import HEARTBEAT_PERIOD_S, StatusPage, io_word
from kvtierd.workers.disk.jobs import JOBS_MAX, SlotJob
from kvtierd.workers.log import logger
from kvtierd.workers.store.looking import Looking
from kvtierd.workers.store.moving import PACK_BYTES, StoreMover

LINGER_S = 0.25
"""So long a WRITE waits for others, which go into the same pack."""
_log = logger(__name__)


class StoreLoop:
    """Runs jobs until it is stopped. A job is reported when nothing of it is under way any more."""

    def __init__(
        self,
        make: Callable[[Callable[[wire.ToFront], None]], tuple[StoreMover, Looking]],
        channel: BlockingPacketChannel,
        status: StatusPage,
        *,
        reads: int,
        writes: int,
    ) -> None:
        """`make` is called in the thread, with what sends to the front. `reads` and `writes`: how many jobs
        of these kinds run at once."""
        self._thread = threading.Thread(target=self._run_loop, name="store", daemon=True)
        self._make = make
        self._channel = channel
        self._status = status
        self._loop = asyncio.new_event_loop()
        self._limits = {
            DiskJobKind.READ: asyncio.Semaphore(reads),
            DiskJobKind.CHECK: asyncio.Semaphore(1),
        }
        self._jobs: set[asyncio.Task[None]] = set()
        """What runs, or waits for its turn, but for WRITEs."""
        self._writes: deque[tuple[float, SlotJob]] = deque()
        """WRITEs that wait, and since when."""
        self._writers = writes
        self._writing = 0
        """How many WRITEs are under way."""
        self._stopped = False
        self._mover: StoreMover
        self._looking: Looking
        self.broken = threading.Event()
        """Set when a bug has ended the loop. The worker then has to end, because the front would wait in
        vain."""

    # --- from the main thread ---

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits after `stop`; False if something is still under way."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs."""
        return bool(self._jobs or self._writes or self._writing)

    def put(self, job: SlotJob) -> None:
        """Begins a job as soon as there is room for it."""
        self._call(partial(self._begin, job))

    def watch(self, message: wire.WatchSpace) -> None:
        self._call(lambda: self._looking.watch(message))

    def unwatch(self, message: wire.UnwatchSpace) -> None:
        self._call(lambda: self._looking.unwatch(message))

    def stop(self) -> None:
        """Drops what has not begun; what has is finished."""
        self._call(self._stop)

    def _call(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    # --- in the loop ---

    def _run_loop(self) -> None:
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._serve())
        except BaseException:
            _log.critical("the thread of a store's worker ends", exc_info=True)
            self.broken.set()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        self._new_write = asyncio.Event()
        self._turn = asyncio.Lock()
        self._mover, self._looking = self._make(self._send)
        looking = asyncio.create_task(self._looking.run())
        beating = asyncio.create_task(self._beat())
        writers = [asyncio.create_task(self._write_packs()) for _ in range(self._writers)]
        try:
            ended = asyncio.create_task(self._ended.wait())
            working = (looking, *writers)
            await asyncio.wait((*working, ended), return_when=asyncio.FIRST_COMPLETED)
            for task in working:
                if task.done() and not self._stopped:
                    task.result()
                    raise AssertionError("what works here does not end by itself")
            await asyncio.wait((*writers, *self._jobs))
        finally:
            looking.cancel()
            beating.cancel()
            self._status.leave(io_word(0))

    async def _beat(self) -> None:
        """A loop that does not come round is stuck in a library: the front sees it, and ends the process."""
        while True:
            self._status.enter(io_word(0))
            await asyncio.sleep(HEARTBEAT_PERIOD_S / 2)

    def _stop(self) -> None:
        self._stopped = True
        self._writes.clear()
        self._new_write.set()
        self._ended.set()

    def _begin(self, job: SlotJob) -> None:
        if job.kind is DiskJobKind.ADOPT:
            self._adopt(job)
            return
        if len(self._jobs) + len(self._writes) >= JOBS_MAX:
            job.fail_rest()
            self._report(job)
            return
        if job.kind is DiskJobKind.WRITE:
            self._writes.append((self._loop.time(), job))
            self._new_write.set()
            return
        task = self._loop.create_task(self._run(job))
        self._jobs.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._jobs.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.critical("a job of a store's worker ends with a bug", exc_info=task.exception())
            self.broken.set()

    async def _run(self, job: SlotJob) -> None:
        async with self._limits[job.kind]:
            if self._stopped:
                return
            try:
                await self._mover.read(job)
            except Exception as error:  # nothing that a message, the image or a store says may end the worker
                _log.exception("a store's job makes no sense, and fails")
                job.fail_rest(f"{type(error).__name__}: {error}")
        self._report(job)

    async def _write_packs(self) -> None:
        """Puts what waits, pack after pack, until the worker is stopped."""
        while not self._stopped:
            async with self._turn:
                jobs = await self._gathered()
            self._writing += len(jobs)
            try:
                await self._mover.write(jobs)
            except Exception as error:
                _log.exception("a store's job makes no sense, and fails")
                for job in jobs:
                    job.fail_rest(f"{type(error).__name__}: {error}")
            self._writing -= len(jobs)
            for job in jobs:
                self._report(job)

    async def _gathered(self) -> list[SlotJob]:
        """WRITEs that fill a pack, or have waited for others for LINGER_S. None if the worker is stopped."""
        while not self._stopped:
            waited_s = self._loop.time() - self._writes[0][0] if self._writes else 0.0
            if self._writes and (waited_s >= LINGER_S or self._waiting_bytes() >= PACK_BYTES):
                break
            self._new_write.clear()
            with contextlib.suppress(TimeoutError):
                left_s = max(0.0, LINGER_S - waited_s) if self._writes else None
                await asyncio.wait_for(self._new_write.wait(), left_s)
        jobs: list[SlotJob] = []
        size = 0
        while self._writes and size < PACK_BYTES:
            _, job = self._writes.popleft()
            jobs.append(job)
            size += self._bytes_of(job)
        return jobs

    def _waiting_bytes(self) -> int:
        return sum(self._bytes_of(job) for _, job in self._writes)

    def _bytes_of(self, job: SlotJob) -> int:
        try:
            return self._mover.bytes_of(job)
        except ValueError:  # it names what is no slot, and will fail
            return 0

    def _adopt(self, job: SlotJob) -> None:
        find = self._looking.answered(job.pack)
        if not len(job):
            return
        if find is None:
            job.fail_rest("nothing of this number was found")
        else:
            try:
                self._mover.adopt(job, find.news, find.shelf)
            except Exception as error:
                _log.exception("a store's job makes no sense, and fails")
                job.fail_rest(f"{type(error).__name__}: {error}")
        self._report(job)

    def _report(self, job: SlotJob) -> None:
        self._send(wire.ToFront(disk_job_finished=job.report()))

    def _send(self, message: wire.ToFront) -> None:
        try:
            self._channel.send(message.SerializeToString())
        except ChannelEndedError:
            pass
