"""Runs worlds, and says how to see a failure again."""

from __future__ import annotations

from tests.simulation.report import Coverage
from tests.simulation.steps import quiesce, step
from tests.simulation.world import World

STEPS_PER_WORLD = 5_000
QUIET_EVERY = 1_500


class SimulationFailed(AssertionError):
    pass


def run_one(
    seed: int, stimuli: int, coverage: Coverage, *, oracle: bool = False, ranks: bool | None = None
) -> None:
    """One world until it has handled so many stimuli. SimulationFailed if anything breaks a promise."""
    world = World(seed, oracle=oracle, ranks=ranks)
    quiet_at = QUIET_EVERY
    try:
        while world.stimuli < stimuli:
            step(world)
            if world.stimuli >= quiet_at:
                quiesce(world)
                quiet_at = world.stimuli + QUIET_EVERY
        quiesce(world)
    except Exception as error:
        again = f"python -m tests.simulation --seed {seed} --steps {stimuli}" + " --oracle" * oracle
        raise SimulationFailed(
            f"{type(error).__name__} after {world.stimuli} stimuli: {error}\nagain: {again}"
        ) from error
    coverage.add(world)


def run_many(first_seed: int, stimuli: int, coverage: Coverage, *, oracle: bool = False) -> None:
    """Worlds of consecutive seeds until they have handled so many stimuli together."""
    seed = first_seed
    while coverage.stimuli < stimuli:
        run_one(seed, min(STEPS_PER_WORLD, stimuli), coverage, oracle=oracle)
        seed += 1
