"""The native module is linked and compiled so that an error in it is hard to make use of."""

import re
import shutil
import subprocess

import pytest
from kvtier_kernels import _native


@pytest.fixture(scope="module")
def told() -> str:
    """What readelf says about the module that is installed."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf (binutils) is not installed")
    command = [readelf, "--dynamic", "--program-headers", "--dyn-syms", "--wide", str(_native.__file__)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_what_the_linker_relocates_cannot_be_written_afterwards(told: str) -> None:
    assert re.search(r"^\s*GNU_RELRO\s", told, re.MULTILINE)
    assert re.search(r"\(FLAGS_1\)\s+Flags:.*\bNOW\b", told), "every function is bound before the first call"


def test_no_stack_is_executable_and_no_segment_is_both_written_and_executed(told: str) -> None:
    segments = re.findall(r"^\s*(GNU_STACK|LOAD)\s+(?:0x\w+\s+){5}([R ][W ][E ])", told, re.MULTILINE)
    assert [flags for kind, flags in segments if kind == "GNU_STACK"] == ["RW "]
    assert len(segments) >= 3
    assert not [flags for _, flags in segments if "W" in flags and "E" in flags]


def test_overflows_of_the_stack_and_of_known_buffers_end_the_process(told: str) -> None:
    imports = re.findall(r"\sUND (__\w+)", told)
    assert "__stack_chk_fail" in imports
    assert [name for name in imports if name.endswith("_chk")], "_FORTIFY_SOURCE has its effect"
