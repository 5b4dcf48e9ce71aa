"""A clock for deadlines of others: it does not run while its owner stands still."""

from hypothesis import given
from hypothesis import strategies as st
from kvtierd.service.steady import GAP_S, SteadyClock


class Hands:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.floats(0, 3600), max_size=50))
def test_it_never_goes_back_and_no_step_is_longer_than_the_gap(steps: list[float]) -> None:
    hands = Hands()
    clock = SteadyClock(hands)
    shown = clock()
    for step in steps:
        hands.now_s += step
        passed = clock() - shown
        assert -1e-6 <= passed <= min(step, GAP_S) + 1e-6
        assert step > GAP_S or abs(passed - step) < 1e-6
        shown += passed


def test_a_long_stop_costs_its_clients_one_gap() -> None:
    hands = Hands()
    clock = SteadyClock(hands)
    before = clock()
    hands.now_s += 3600
    assert clock() - before == GAP_S
