"""Workers that die, hang or are stopped among copies of a GPU's memory."""

from tests.integration.worker.test_faults import (
    test_a_hanging_copy_is_found_and_its_worker_killed,
    test_a_worker_killed_in_the_middle_of_a_copy_is_proved_gone_and_replaced,
    test_a_worker_that_dies_by_itself_is_replaced,
    test_slow_copies_are_no_hang,
    test_stop_finishes_what_runs_and_revokes_the_rest,
)

__all__ = [
    "test_a_hanging_copy_is_found_and_its_worker_killed",
    "test_a_worker_killed_in_the_middle_of_a_copy_is_proved_gone_and_replaced",
    "test_a_worker_that_dies_by_itself_is_replaced",
    "test_slow_copies_are_no_hang",
    "test_stop_finishes_what_runs_and_revokes_the_rest",
]
