"""The simulated world keeps its promises for 100,000 stimuli, and has then met everything it can meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.state.disks import Disk
from kvtierd.core.state.entities import WorkerRecord

from tests.simulation import disk_faults, faults
from tests.simulation.report import Coverage
from tests.simulation.run import SimulationFailed, run_many, run_one
from tests.simulation.steps import STEPS

STIMULI = 100_000
ORACLE_STIMULI = 15_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_seed_breaks_a_promise(proved: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    coverage = Coverage()
    run_many(1, STIMULI, coverage)
    run_many(10_001, STIMULI + ORACLE_STIMULI, coverage, oracle=True)
    with capsys.disabled():
        print("\n" + coverage.text())
    assert coverage.missing() == []
    faults = sum(coverage.faults.values())
    proved(
        f"{coverage.stimuli:,} stimuli and {faults:,} faults in {coverage.worlds} simulated worlds: "
        "no wrong byte, no lost block, no leak"
    )


def test_a_seed_tells_the_same_story_twice() -> None:
    stories = []
    for _ in range(2):
        coverage = Coverage()
        run_one(7, 600, coverage)
        stories.append(coverage.text())
    assert stories[0] == stories[1]


def test_both_tables_tell_the_same_story() -> None:
    stories = []
    for oracle in (False, True):
        coverage = Coverage()
        run_one(8, 600, coverage, oracle=oracle)
        stories.append(coverage.text())
    assert stories[0] == stories[1]


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the world notices: here a load forgets to have recovered blocks verified."""
    monkeypatch.setattr("kvtierd.core.transfers.transfers.VERIFY", 0)
    monkeypatch.setitem(STEPS, faults.daemon_dies, 2.0)
    with pytest.raises(SimulationFailed, match=r"wrong bytes(.|\n)*--seed \d+ --steps 5000"):
        run_many(1, 200_000, Coverage())


def test_a_read_that_is_given_up_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the slots that a lost worker of a disk may still be reading into are freed before it is gone."""
    lose = DiskJobs.lose

    def lose_and_free(jobs: DiskJobs, disk: Disk, worker: WorkerRecord) -> int:
        count = lose(jobs, disk, worker)
        jobs.exited(disk, worker)
        return count

    monkeypatch.setattr(DiskJobs, "lose", lose_and_free)
    monkeypatch.setitem(STEPS, disk_faults.worker_lost, 4.0)
    with pytest.raises(SimulationFailed, match=r"--seed \d+ --steps 5000"):
        run_many(3, 200_000, Coverage())
