"""Which processes may have written a slot, and when it is certain that they are gone."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvtierd.memory.processes import ROUNDING_TICKS, kernel_boot, name_process, pid_namespace, proved_gone
from kvtierd.memory.writers import TABLE_OFFSET, WriterTable, living

HEADER_AREA = 2 << 20
MINE = os.getpid()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def new_table() -> tuple[npt.NDArray[np.uint8], WriterTable]:
    """The bytes of an empty table, and the table; no slot names a writer."""
    pool = np.zeros(HEADER_AREA, np.uint8)
    return pool, WriterTable(pool, set)


def stat_after_name(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def entry(pool: npt.NDArray[np.uint8], writer: int) -> bytes:
    return pool[TABLE_OFFSET + 32 * writer : TABLE_OFFSET + 32 * (writer + 1)].tobytes()


def test_an_entry_names_the_process_in_32_bytes(process: subprocess.Popen[bytes]) -> None:
    pool, table = new_table()
    assert table.register(process.pid) == 1
    start_ticks = int(stat_after_name(process.pid)[19])
    expected = process.pid.to_bytes(4, "little")
    rest = b"".join(value.to_bytes(8, "little") for value in (start_ticks, kernel_boot(), pid_namespace()))
    assert entry(pool, 1) == expected + zlib.crc32(expected + rest).to_bytes(4, "little") + rest
    assert table.capacity == (HEADER_AREA - 4096) // 32


@pytest.mark.parametrize("pid", [2**31, 2**32 - 1])
def test_an_entry_whose_pid_no_process_can_have_is_forgotten(pid: int) -> None:
    pool, _ = new_table()
    start = pid.to_bytes(4, "little")
    rest = b"".join(value.to_bytes(8, "little") for value in (5, kernel_boot(), pid_namespace()))
    checksum = zlib.crc32(start + rest).to_bytes(4, "little")
    pool[TABLE_OFFSET + 32 : TABLE_OFFSET + 64] = np.frombuffer(start + checksum + rest, np.uint8)
    table = WriterTable(pool, set)
    assert living(pool[TABLE_OFFSET:].tobytes()) == []
    assert not table.gone(1), "nothing proves it, as for an entry that is damaged"
    table.sweep([])
    assert entry(pool, 1)[:4] == bytes(4)


def test_ids_rise_and_are_given_again_only_when_no_slot_names_them(process: subprocess.Popen[bytes]) -> None:
    pool, table = new_table()
    assert [table.register(process.pid), table.register(MINE), table.register(MINE)] == [1, 2, 3]
    process.kill()
    process.wait()
    assert WriterTable(pool, lambda: {1}).register(MINE) == 4, "1 is named by a slot, 2 and 3 live"
    assert WriterTable(pool, set).register(MINE) == 1


def test_a_process_that_is_not_there_gets_no_id(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _, table = new_table()
    with pytest.raises(ValueError, match=f"pid {process.pid}: no such process"):
        table.register(process.pid)


def test_sweeping_forgets_who_is_gone_and_keeps_who_is_named(process: subprocess.Popen[bytes]) -> None:
    pool, table = new_table()
    table.set_owner(MINE)
    for pid in (process.pid, process.pid, MINE):
        table.register(pid)
    process.kill()
    process.wait()
    table.sweep({2})
    assert [entry(pool, writer)[:4] != bytes(4) for writer in range(4)] == [True, False, True, True]


def test_a_torn_entry_proves_nothing() -> None:
    pool, table = new_table()
    assert table.register(MINE) == 1
    pool[TABLE_OFFSET + 32 + 8] ^= 1
    assert not table.gone(1)
    assert not table.gone(9)
    assert not table.gone(65535)
    assert living(pool[TABLE_OFFSET:].tobytes()) == []


def test_after_a_reboot_every_writer_is_gone_even_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, table = new_table()
    table.set_owner(MINE)
    assert table.register(MINE) == 1
    next_boot = kernel_boot() ^ 1
    for module in ("processes", "writers"):
        monkeypatch.setattr(f"kvtierd.memory.{module}.kernel_boot", lambda: next_boot)
    after = WriterTable(pool, set)
    assert after.gone(1)
    assert after.gone(77)


def test_the_living_are_listed_once_each(process: subprocess.Popen[bytes]) -> None:
    pool, table = new_table()
    table.set_owner(MINE)
    table.register(MINE)
    table.register(process.pid)
    assert living(pool[TABLE_OFFSET:].tobytes()) == sorted([MINE, process.pid])


# --- proved gone --------------------------------------------------------------------------------------------


def test_a_living_process_is_not_gone(process: subprocess.Popen[bytes]) -> None:
    assert not proved_gone(name_process(process.pid))


def test_a_dead_process_is_gone_reaped_or_not(process: subprocess.Popen[bytes]) -> None:
    name = name_process(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert proved_gone(name), "a zombie has no memory and no descriptors"
    process.wait()
    assert proved_gone(name)


def test_another_process_with_the_same_pid_is_another(process: subprocess.Popen[bytes]) -> None:
    name = name_process(process.pid)
    assert proved_gone(replace(name, start_ticks=name.start_ticks + ROUNDING_TICKS + 1))


def test_a_pid_of_another_boot_is_gone_and_of_another_namespace_unknown() -> None:
    name = name_process(MINE)
    assert proved_gone(replace(name, boot=name.boot ^ 1))
    assert not proved_gone(replace(name, namespace=name.namespace + 1, pid=2**22 + 1))


LEADER_EXITS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit, of this thread alone
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call")
def test_a_zombie_whose_other_threads_live_is_not_gone() -> None:
    command = [sys.executable, "-c", LEADER_EXITS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        name = name_process(child.pid)
        while stat_after_name(child.pid)[0] != "Z":
            os.sched_yield()
        assert not proved_gone(name)
        child.kill()
        child.wait()
        assert proved_gone(name)
