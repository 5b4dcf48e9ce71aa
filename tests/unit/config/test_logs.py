"""One log line: for people, and for machines."""

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from kvtierd import logs


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("kvtierd")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], ours.level = before[0], before[2]
    root.setLevel(before[1])


def logged(style: str, level: str = "info") -> str:
    stream = io.StringIO()
    logs.configure(level, style, stream)
    log = logs.logger("kvtierd.test")
    log.debug("too quiet")
    log.info("session attached", session=3, client="a b", empty="")
    return stream.getvalue()


def test_people_get_one_line_with_fields() -> None:
    line = logged("human")
    assert line.endswith('info     session attached  session=3 client="a b" empty=""\n')
    assert line.count("\n") == 1


def test_machines_get_one_object_a_line() -> None:
    entry = json.loads(logged("json"))
    entry.pop("time")
    assert entry == {
        "level": "info",
        "logger": "kvtierd.test",
        "message": "session attached",
        "session": 3,
        "client": "a b",
        "empty": "",
    }


def test_the_time_of_an_object_is_rfc_3339() -> None:
    before = datetime.now(UTC)
    said = json.loads(logged("json"))["time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", said)
    assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(said) <= datetime.now(UTC)


@pytest.mark.parametrize("seconds", [0.0, 1_795_406_706.0, 1_795_406_706.1234567, 1_795_406_706.9999999])
def test_a_whole_second_has_its_microseconds_too(seconds: float) -> None:
    said = logs.rfc3339(seconds)
    assert len(said) == len("2026-11-23T04:05:06.123456Z")
    assert datetime.fromisoformat(said).timestamp() == pytest.approx(seconds, abs=1e-6)


def test_auto_is_json_away_from_a_terminal() -> None:
    json.loads(logged("auto"))


def test_debug_shows_more() -> None:
    assert "too quiet" in logged("human", "debug")


def test_an_exception_comes_with_its_traceback() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    try:
        raise KeyError("lost")
    except KeyError as error:
        logs.logger("kvtierd.test").error("failed", exc_info=error)
    assert "KeyError: 'lost'" in json.loads(stream.getvalue())["exception"]


def test_a_field_cannot_pose_as_the_message() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logs.logger("kvtierd.test").info("true", message="false")
    assert json.loads(stream.getvalue())["message"] == "true"


def test_libraries_are_heard_from_warnings_on() -> None:
    stream = io.StringIO()
    logs.configure("debug", "human", stream)
    logging.getLogger("grpc").info("chatter")
    logging.getLogger("grpc").warning("trouble")
    assert "chatter" not in stream.getvalue()
    assert "trouble" in stream.getvalue()


def test_a_pipe_that_nobody_reads_costs_lines_and_no_wait() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as reading, open(writer, "w") as writing:
        logs.configure("info", "json", writing)
        log = logs.logger("kvtierd.test")
        for number in range(2_000):  # far more than a pipe holds
            log.info("line", number=number, padding="x" * 200)
        assert reading.read(1 << 20)
        log.info("somebody reads again")
        said = reading.read(1 << 20).decode().splitlines()
    assert "lines were dropped" in json.loads(said[-2])["message"]
    assert json.loads(said[-1])["message"] == "somebody reads again"


def test_a_line_longer_than_a_pipe_takes_at_once_arrives_whole() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as reading, open(writer, "w") as writing:
        logs.configure("info", "json", writing)
        logs.logger("kvtierd.test").info("long", padding="x" * 20_000)
        assert len(json.loads(reading.read(1 << 20))["padding"]) == 20_000
