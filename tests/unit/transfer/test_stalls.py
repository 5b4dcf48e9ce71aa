"""Which workers are taken to be stuck, and which are not."""

from kvtierd.workers.channel.status import (
    HEARTBEAT_PERIOD_S,
    IO_THREADS_MAX,
    StallDetector,
    StatusWord,
    io_word,
)

BUSY = 123_456_789


def reading(load: int = 0, store: int = 0, heartbeat: int = 0) -> tuple[int, ...]:
    values = {StatusWord.LOAD_LANE: load, StatusWord.STORE_LANE: store, StatusWord.HEARTBEAT: heartbeat}
    return tuple(values.get(word, 0) for word in StatusWord)


def test_a_lane_inside_one_call_for_too_long_is_stuck() -> None:
    detector = StallDetector(1.0)
    assert detector.observe(reading(store=BUSY), 0.25) is None
    for _ in range(3):
        assert detector.observe(reading(store=BUSY), 0.25) is None
    stuck = detector.observe(reading(store=BUSY), 0.25)
    assert stuck is not None
    assert "store lane" in stuck


def test_a_lane_that_goes_from_call_to_call_is_not() -> None:
    detector = StallDetector(1.0)
    for call in range(1, 100):
        assert detector.observe(reading(load=call), 0.9) is None


def test_a_lane_that_does_nothing_is_not() -> None:
    detector = StallDetector(1.0)
    for _ in range(100):
        assert detector.observe(reading(heartbeat=0), 0.9) is None


def test_time_before_the_first_sight_of_a_call_does_not_count() -> None:
    detector = StallDetector(1.0)
    assert detector.observe(reading(load=BUSY), 100.0) is None
    assert detector.observe(reading(), 0.5) is None
    assert detector.observe(reading(load=BUSY), 0.9) is None


def test_a_main_thread_may_sleep_for_a_heartbeat() -> None:
    detector = StallDetector(1.0)
    detector.observe(reading(heartbeat=BUSY), 0.0)
    assert detector.observe(reading(heartbeat=BUSY), HEARTBEAT_PERIOD_S + 0.9) is None
    stuck = detector.observe(reading(heartbeat=BUSY), 0.2)
    assert stuck is not None
    assert "main thread" in stuck


def test_a_pool_that_is_registered_and_stays_so_accuses_nobody() -> None:
    detector = StallDetector(1.0)
    registered = [0] * len(StatusWord)
    registered[StatusWord.REGISTERED_BYTES] = 1 << 40
    for _ in range(10):
        assert detector.observe(tuple(registered), 1.0) is None


def test_a_disk_that_does_nothing_is_stuck_and_one_that_gets_on_is_not() -> None:
    detector, waiting = StallDetector(1.0), [0] * len(StatusWord)
    for step in range(1, 20):
        waiting[io_word(IO_THREADS_MAX - 1)] = BUSY + step
        assert detector.observe(tuple(waiting), 0.9) is None
    stuck = detector.observe(tuple(waiting), 1.0)
    assert stuck is not None
    assert "disk" in stuck
