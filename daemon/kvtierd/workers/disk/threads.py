"""The threads of a disk's worker, which take jobs, move them batch by batch, and report them."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.blocking import BlockingPacketChannel, ChannelEndedError
from kvtierd.workers.disk.jobs import JobQueue, PersistAll, SlotJob
from kvtierd.workers.disk.moving import Mover
from kvtierd.workers.log import logger

_log = logger(__name__)


class DiskThreads:
    """One thread for each mover. A job is reported when none of its operations is under way any more."""

    def __init__(self, movers: Sequence[Mover], queue: JobQueue, channel: BlockingPacketChannel) -> None:
        self._queue = queue
        self._channel = channel
        self._threads = [
            threading.Thread(target=self._run, args=(mover,), name=f"io {number}", daemon=True)
            for number, mover in enumerate(movers)
        ]
        self.broken = threading.Event()
        """Set when a report is lost, or a bug has ended a thread. The worker then has to end, because the
        front would wait in vain."""

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits after the queue was stopped; False if a thread is still busy."""
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def report(self, job: SlotJob) -> None:
        """Reports a job, from any thread. Does nothing if the front is gone."""
        try:
            self._channel.send(wire.ToFront(disk_job_finished=job.report()).SerializeToString())
        except ChannelEndedError:
            pass

    def persisted(self, task: PersistAll, why: str) -> None:
        """Reports that all records are persisted, or `why` they are not, from any thread. Does nothing if the
        front is gone."""
        done = wire.RecordsPersisted(request=task.request, error=why)
        try:
            self._channel.send(wire.ToFront(records_persisted=done).SerializeToString())
        except ChannelEndedError:
            pass

    def _run(self, mover: Mover) -> None:
        try:
            while (task := self._queue.take()) is not None:
                if isinstance(task, SlotJob):
                    self._work(mover, task)
                elif isinstance(task, PersistAll):
                    self._persist_all(mover, task)
                else:
                    _guarded(partial(mover.persist, task))
                    self._queue.finished(task)
        except BaseException:
            _log.critical("a thread of a disk's worker ends", exc_info=True)
            self.broken.set()

    def _persist_all(self, mover: Mover, task: PersistAll) -> None:
        why = _guarded(mover.persist_all)
        self._queue.finished(task)
        self.persisted(task, why)

    def _work(self, mover: Mover, job: SlotJob) -> None:
        while job.done < len(job):
            if why := _guarded(lambda: mover.advance(job)):
                job.fail_rest(why)
            elif job.done < len(job) and self._queue.should_yield(job.kind):
                self._queue.put_back(job)
                return
        self._queue.finished(job)
        self.report(job)


def _guarded(action: Callable[[], None]) -> str:
    """Why the action failed; empty if it did not. Nothing that a message or the image says may end the
    worker."""
    try:
        action()
    except OSError as error:
        return str(error)
    except Exception as error:
        _log.exception("a disk's job makes no sense, and fails")
        return f"{type(error).__name__}: {error}"
    return ""
