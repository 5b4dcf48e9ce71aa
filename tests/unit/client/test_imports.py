"""What is imported, and when: nobody pays for what is not used."""

import subprocess
import sys

import kvtier
import pytest


def loaded(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after this statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(result.stdout.split())


def test_every_name_is_there_and_is_listed() -> None:
    for name in kvtier.__all__:
        assert getattr(kvtier, name) is not None
    assert set(kvtier.__all__) <= set(dir(kvtier))
    with pytest.raises(AttributeError, match="has no attribute 'Clint'"):
        kvtier.Clint  # noqa: B018


def test_messages_come_without_the_client() -> None:
    found = loaded("import kvtier.v1.cache_pb2")
    assert not {name for name in found if name.startswith("kvtier.") and not name.startswith("kvtier.v1")}
    assert "grpc" not in found


def test_a_name_brings_what_it_needs() -> None:
    assert "kvtier.client" in loaded("from kvtier import Client")


def test_operators_commands_come_without_the_daemon() -> None:
    found = loaded("import kvtierd.ctl.commands")
    assert not found & {"kvtierd.core.machine", "kvtierd.cache", "kvtierd.rpc.connections", "kvtier.client"}
