"""One command for a machine with an NVIDIA GPU: builds where needed, checks every byte, then measures the
matrix.

    python tests/gpu/run.py                         everything, within 540 s; results under tests/gpu/results/
    python tests/gpu/run.py --steps ceiling,batches some steps of the matrix, without the suite
    python tests/gpu/run.py --call 1                the first of four calls of ten minutes (calls.py)
    python tests/gpu/run.py --fake                  the same steps, tiny, on the fake driver: does it all run?

Needs no network. Each step runs in a process group of its own with a deadline; one that fails is recorded and
the next goes on. The record (results.json) is complete after every step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:  # run as a script
    sys.path.insert(0, str(REPO))

from tests.gpu import machine, report  # noqa: E402
from tests.gpu.calls import CALLS  # noqa: E402
from tests.gpu.isolate import run_step  # noqa: E402
from tests.gpu.plan import BY_NAME, MATRIX, PROBE, Step  # noqa: E402
from tests.gpu.prepare import CannotPrepareError, prepare  # noqa: E402
from tests.gpu.record import FAILED, LATE, Record, StepRecord  # noqa: E402
from tests.gpu.suite import run_suite  # noqa: E402
from tests.support.leaks import SHM, SHM_PREFIX  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
REPORT_S = 10.0
"""Kept back for the report."""
SUITE_SHARE = 0.4
"""Of the budget; what the suite does not use is the matrix's."""


def main() -> int:
    """0 if the suite passed and no step failed; 1 otherwise; 2 if nothing could be run."""
    arguments = parse()
    begun = time.monotonic()
    started = datetime.datetime.now(datetime.UTC)
    facts = machine.hardware()
    name = f"{machine.short_name(facts, arguments.fake)}-{started:%Y-%m-%d}"
    folder: Path = (arguments.out or RESULTS / name).resolve()
    out = folder / f"call-{arguments.call}" if arguments.call else folder
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.write_text("")
    record = Record(
        path=out / "results.json",
        fake=arguments.fake,
        started=f"{started:%Y-%m-%dT%H:%M:%SZ}",
        hardware=facts,
        source=machine.source(arguments.commit),
        conditions=machine.conditions() | {"budget_s": arguments.budget_s, "arguments": sys.argv[1:]},
    )
    record.flush()
    if said := machine.said_by("nvidia-smi", "-q"):
        (out / "nvidia-smi.txt").write_text(said)
    try:
        with driver(arguments.fake) as more, scratch() as pools:
            prepared = prepare(arguments.build, arguments.wheels, log)
            record.conditions |= {"prepared": prepared.facts, "prepare_s": round(time.monotonic() - begun, 1)}
            record.flush()
            environment = prepared.environment | more | pools
            for step in steps_to_run(arguments, record, environment, begun, log):
                say(step)
    except CannotPrepareError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    finally:
        records = sorted(folder.glob("call-*/results.json")) if arguments.call else [record.path]
        print(report.write(records, folder))
    return 1 if any(step.state in (FAILED, LATE) for step in record.steps) else 0


def steps_to_run(
    arguments: argparse.Namespace, record: Record, environment: dict[str, str], begun: float, log: Path
) -> Iterator[StepRecord]:
    """Runs probe, suite and matrix, and yields what each gave once it is in the record."""
    environment = environment | {"KVTIER_GPU_RECORD": str(record.path)}

    def left_s() -> float:
        return float(arguments.budget_s) - REPORT_S - (time.monotonic() - begun)

    def one(step: Step) -> StepRecord:
        at_most_s = min(step.deadline_s, arguments.step_s)
        done = run_step(
            step,
            fake=arguments.fake,
            left_s=left_s(),
            at_most_s=at_most_s,
            environment=environment,
            log=log,
        )
        record.add(done)
        return done

    yield one(PROBE)
    if arguments.suite and not arguments.fake:
        deadline_s = max(1.0, min(arguments.suite_s, left_s()))
        record.add(run_suite(deadline_s=deadline_s, environment=environment, log=log))
        yield record.steps[-1]
    for step in arguments.steps:
        yield one(step)


@contextlib.contextmanager
def driver(fake: bool) -> Iterator[dict[str, str]]:
    """What the environment needs beyond ours: nothing on a real driver."""
    if not fake:
        yield {}
        return
    from tests.gpu.parts.fake import fake_driver

    with fake_driver() as environment:
        yield environment


@contextlib.contextmanager
def scratch() -> Iterator[dict[str, str]]:
    """A folder for pools in /dev/shm, gone at the end whatever became of the steps that used it."""
    folder = tempfile.mkdtemp(prefix=f"{SHM_PREFIX}run-", dir=SHM)
    try:
        yield {"KVTIER_GPU_SCRATCH": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def say(step: StepRecord) -> None:
    """One line per step, as it ends."""
    why = step.why.splitlines()[0] if step.why else f"{len(step.rows)} rows"
    print(f"  {step.number:>2}  {step.state:<8} {step.seconds:6.1f} s  {step.title}: {why}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"Steps: {', '.join(step.name for step in MATRIX)}.",
    )
    parser.add_argument("--out", type=Path, help="folder for results.json, report.md and plots")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for everything (default 540)")
    parser.add_argument("--suite-s", type=float, help="seconds for the suite at most (default: 40 %% of it)")
    parser.add_argument("--step-s", type=float, default=600.0, help="seconds for one step at most")
    parser.add_argument(
        "--call",
        type=int,
        choices=CALLS,
        help="one of four parts, most important first: "
        + "; ".join(f"{number} {call.title}" for number, call in CALLS.items()),
    )
    parser.add_argument("--steps", help="names, separated by commas (default: all); without the suite")
    parser.add_argument("--no-suite", dest="suite", action="store_false", help="only measure")
    parser.add_argument("--no-matrix", dest="matrix", action="store_false", help="only probe and check")
    parser.add_argument("--fake", action="store_true", help="tiny sizes on the fake driver")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, privately")
    parser.add_argument("--build", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--commit", default="", help="names the source where there is no git")
    arguments = parser.parse_args()
    if arguments.call and (arguments.steps or not arguments.suite or not arguments.matrix):
        parser.error("--call says itself what runs: leave out --steps, --no-suite and --no-matrix")
    chosen = list(MATRIX) if arguments.matrix else []
    if arguments.call:
        call = CALLS[arguments.call]
        arguments.suite = call.suite
        chosen = [BY_NAME[step] for step in call.steps]
    if arguments.steps:
        names = arguments.steps.split(",")
        if unknown := [name for name in names if name not in BY_NAME]:
            parser.error(f"unknown step {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
        chosen = [BY_NAME[name] for name in names if name != PROBE.name]  # which always runs
        arguments.suite = False
    arguments.steps = chosen
    if arguments.suite_s is None:
        arguments.suite_s = (1.0 if arguments.suite and not chosen else SUITE_SHARE) * arguments.budget_s
    return arguments


if __name__ == "__main__":
    sys.exit(main())
