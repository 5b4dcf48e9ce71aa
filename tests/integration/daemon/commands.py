"""Commands of an operator, and calls of the admin service."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.support.process import DEADLINE_S, Daemon


@contextmanager
def admin(daemon: Daemon) -> Iterator[admin_pb2_grpc.AdminStub]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield admin_pb2_grpc.AdminStub(channel)


def kvtierctl(daemon: Daemon, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As an operator calls it."""
    name, *rest = arguments
    command = [sys.executable, "-m", "kvtierd.ctl", name, f"--socket={daemon.socket}", *rest]
    environment = os.environ | {"KVTIER_CONFIG": ""}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment, input=stdin
    )


def explain(daemon: Daemon, block_hash: bytes, **request: object) -> list[admin_pb2.Explanation]:
    with admin(daemon) as stub:
        question = admin_pb2.ExplainRequest(hash=block_hash, **request)  # type: ignore[arg-type]
        return list(stub.Explain(question, timeout=DEADLINE_S).explanations)


def verdict(daemon: Daemon, block_hash: bytes) -> str:
    [only] = explain(daemon, block_hash)
    return admin_pb2.Verdict.Name(only.verdict).removeprefix("VERDICT_")


def reload(daemon: Daemon, *flags: str) -> tuple[int, str]:
    """`kvtierctl reload`: its exit status, and what it said."""
    command = [sys.executable, "-m", "kvtierd.ctl", "reload", f"--socket={daemon.socket}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout + done.stderr
