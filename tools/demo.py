"""`make demo`: one cache, two engines. A vLLM computes a long prefix and is killed; another gets it back.
Then the daemon is killed while that engine lives: it is started again, and the engine hits again. Then its
pool is taken away as well, as a reboot of the host would: the engine hits from disk. Then the pool is made
so small that the prompt nearly fills it. At last an API server starts a daemon itself, which outlives it.

Everything is real: kvtierd on its embedded default and a folder for its disk tier, two vLLM engines on the
CPU, a model made on the spot, and the text of LICENSE as prompt (its bytes are the token ids). The last line
of the output is one JSON object; the exit status is 0 only if every claim held. Nothing is left but what lies
under build/demo/.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from kvtier_kernels import PoolRecords
from kvtierd.config import daemon as config

from tests.vllm.engine import Engine, EngineError, EngineOptions, Generated
from tools.demo_autostart import daemon_survives
from tools.tiny_llama import PRESETS, ensure

REPO = Path(__file__).resolve().parents[1]
OUT = REPO / "build" / "demo"
BIN = Path(sys.executable).parent
BLOCK_TOKENS = 32
PROMPT_TOKENS = 2_000
MAX_MODEL_LEN = 2_112
OUTPUT_TOKENS = 32
DEADLINE_S = 60.0
DISK_SIZE = "256MiB"
CONNECTOR = {
    "kv_connector": "KvtierConnector",
    "kv_connector_module_path": "kvtier_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    # Resets only flush the engine's cache, everything that can be loaded is loaded, and answers are compared
    # bit for bit with those of a hit of the same length.
    "kv_connector_extra_config": {"on_reset": "keep", "min_load_tokens": 1, "audit_rate": 0},
}


class DemoError(Exception):
    """Something that the story needs did not happen. The message is one sentence."""


def say(text: str) -> None:
    print(text, flush=True)


class Daemon:
    """A `kvtierd serve`, as a user starts it, and what it tells about itself."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment = os.environ | environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.status: dict[str, Any] = {}

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(BIN / "kvtierd"), "serve"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for("kvtierd to answer", lambda status: bool(status))

    def refresh(self) -> dict[str, Any]:
        """Returns what `kvtierctl status --json` says, or an empty dictionary if nobody answers."""
        command = [str(BIN / "kvtierctl"), "status", "--json"]
        result = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        self.status = json.loads(result.stdout) if result.returncode == 0 else {}
        return self.status

    def show(self) -> None:
        """Prints `kvtierctl status` as a person sees it."""
        command = [str(BIN / "kvtierctl"), "status"]
        result = subprocess.run(
            command, env=self._environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True
        )
        say(textwrap.indent(result.stdout.rstrip(), "  "))

    def wait_for(self, what: str, reached: Any) -> None:
        """Polls the status until `reached(status)`. Raises DemoError if the daemon dies or it takes
        too long."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not reached(self.refresh()):
            if self._process is None or self._process.poll() is not None:
                *_, reason = ["nothing was logged", *self._log.read_text().splitlines()]
                raise DemoError(f"kvtierd ended while waiting for {what}: {reason.strip()}; see {self._log}")
            if time.monotonic() > deadline_s:
                raise DemoError(f"waited {DEADLINE_S:.0f} s for {what}; see {self._log}")
            time.sleep(0.1)

    def metric_lines(self, *names: str) -> list[str]:
        """Returns the lines of /metrics that begin with one of the names."""
        with urllib.request.urlopen(self.status["metrics_url"], timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        return [line for line in lines if line.startswith(names)]

    def kill(self) -> None:
        """Kills the daemon with SIGKILL, and waits for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None

    def drain(self) -> None:
        """Runs `kvtierctl drain --for-restart`, as before an upgrade, prints what it says, and waits for the
        daemon's end."""
        assert self._process is not None
        command = [str(BIN / "kvtierctl"), "drain", "--for-restart"]
        result = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if result.returncode != 0 or self._process.wait(DEADLINE_S) != 0:
            raise DemoError(f"kvtierd was not drained: {result.stdout}{result.stderr}; see {self._log}")
        self._process = None
        for line in result.stdout.splitlines():
            say(f"  {line}")

    def stop(self) -> None:
        """Ends the daemon with SIGTERM, as an init system would, or with SIGKILL if that takes too long."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                pass
            self.kill()


def disk(stack: ExitStack) -> dict[str, str]:
    """Returns the environment of a daemon with a disk tier below build/demo, to which blocks are written as
    soon as they are stored."""
    folder = OUT / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return {
        "KVTIER_DISK_PATHS": str(folder),
        "KVTIER_DISK_SIZE": DISK_SIZE,
        "KVTIER_DISK_WRITE_MODE": "through",
    }


def keep_to_ourselves(stack: ExitStack, folder: Path = OUT) -> None:
    """Sets variables for every process of the demo: what they cache goes to `folder`, what they leave in the
    temporary folder ends with us, and the metrics port is nobody else's."""
    # The folder is in /tmp, because the paths of the Unix sockets in it have to be short.
    temporary = tempfile.mkdtemp(prefix="kvtier-demo-", dir="/tmp")
    stack.callback(shutil.rmtree, temporary, ignore_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["KVTIER_METRICS_LISTEN"] = "127.0.0.1:0"


def place(stack: ExitStack) -> dict[str, str]:
    """Returns the environment for daemon and engines: the embedded default, or a place of our own if that is
    taken."""
    default = config.load(None, {}).config
    pool = default.pool.file
    assert pool is not None
    if not pool.exists() and not default.server.socket_path.exists():
        stack.callback(remove, pool.parent, pool)
        stack.callback(remove, default.server.socket_path.parent)
        return {}
    own = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir="/dev/shm"))
    stack.callback(shutil.rmtree, own, ignore_errors=True)
    say(f"The default paths are taken, or KVTIER_ variables name others. The demo uses {own} instead.")
    socket = own / "kvtierd.sock"
    return {
        "KVTIER_SERVER_SOCKET": str(socket),
        "KVTIER_SOCKET": str(socket),
        "KVTIER_POOL_PATH": str(own / "pool"),
    }


def remove(directory: Path, *files: Path) -> None:
    """Removes files of ours, and the directory if nothing else is in it."""
    for file in files:
        file.unlink(missing_ok=True)
    for leftover in ("kvtierd.sock", "kvtierd.side.sock", "kvtierd.sock.lock"):
        (directory / leftover).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError:
        pass  # the directory never existed, or holds something that is not ours


def prompts() -> tuple[list[int], list[int]]:
    """Returns the prompt, and another of the same length to warm up with. They share no block."""
    text = list((REPO / "LICENSE").read_bytes())
    return text[:PROMPT_TOKENS], text[PROMPT_TOKENS : 2 * PROMPT_TOKENS]


def stored_slots(pool: Path) -> set[int]:
    """Returns the slots of the pool file that hold a block, read in the way in which the daemon's recovery
    reads them."""
    with (
        pool.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as view,
    ):
        data = np.frombuffer(view, np.uint8)
        slots = {int(slot) for slot in PoolRecords(data).scan()["slots"]}
        del data
    return slots


def corrupt(pool: Path, slot: int) -> None:
    """Flips one byte in the middle of a slot's first page."""
    with pool.open("r+b") as file:
        file.seek(slot * mmap.PAGESIZE + mmap.PAGESIZE // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


@dataclass
class Engines:
    """Starts engines that use the daemon, and makes sure that none outlives the demo."""

    model: Path
    environment: dict[str, str]
    stack: ExitStack
    folder: Path = OUT
    """Where their logs go."""

    def start(self, name: str) -> Engine:
        options = EngineOptions(
            model=self.model,
            kv_transfer_config=CONNECTOR,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN,
            block_size=BLOCK_TOKENS,
            environment=self.environment,
        )
        started = time.monotonic()
        engine = Engine.start(options, self.folder / f"{name}.log")
        self.stack.callback(engine.kill)
        say(f"  {name}: vLLM is up, pid {engine.pid} ({time.monotonic() - started:.0f} s)")
        return engine


def one(engine: Engine, prompt: list[int]) -> Generated:
    """Runs one request to its end, with whatever it left to copy."""
    result = engine.generate([prompt], max_tokens=OUTPUT_TOKENS)[0]
    engine.drain()
    return result


def same(left: Generated, right: Generated) -> bool:
    """Returns whether two answers are the same bit for bit: tokens, and log probabilities of the best five at
    each position."""
    return left.tokens == right.tokens and left.logprobs == right.logprobs


def forget(engine: Engine) -> None:
    """Empties the engine's own prefix cache, and overwrites its KV bytes."""
    engine.reset_prefix_cache()
    engine.overwrite_cache()


def say_found(daemon: Daemon) -> None:
    """Prints what a daemon that has just started has found in its pool."""
    found = daemon.status["pool"]
    say(
        f"  kvtierd is up again, {found.get('start')}: {found.get('recovered_blocks', 0)} blocks found"
        f" in {found.get('recovery_s', 0):.3f} s"
    )


def settle(daemon: Daemon) -> None:
    """Waits until every submitted store is committed."""
    daemon.wait_for("the stores to be committed", lambda s: s and int(s.get("transfers_active", 0)) == 0)


def on_disk(status: dict[str, Any]) -> int:
    """Returns how many blocks the disk tier holds."""
    return sum(int(each.get("blocks", 0)) for each in status.get("disks", ()))


def settle_on_disk(daemon: Daemon) -> None:
    """Waits until every block of the host is on the disk as well."""
    daemon.wait_for(
        "the blocks to be on disk", lambda s: s and on_disk(s) >= int(s.get("blocks", {}).get("ready", 0)) > 0
    )


def tight_pool(status: dict[str, Any]) -> str:
    """Returns, as a setting, a pool size of which the prompt's blocks fill about four fifths."""
    block_bytes = int(status["pool"]["used_bytes"]) / int(status["blocks"]["ready"])
    blocks = (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS
    return f"{math.ceil(blocks * block_bytes / 0.8 / (1 << 20)) + 2}MiB"


def ready(daemon: Daemon) -> None:
    """Waits until an engine has attached with its memory and its scheduler, which come one by one."""

    def complete(instance: dict[str, Any]) -> bool:
        roles = " ".join(session.get("role", "") for session in instance.get("sessions", ()))
        return bool(instance.get("ready")) and "scheduler" in roles

    daemon.wait_for("an engine to attach", lambda s: any(complete(i) for i in s.get("instances", ())))


def story(stack: ExitStack) -> dict[str, Any]:
    """Tells the story, step by step. Returns the figures."""
    full_tokens = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    prompt, warm_up = prompts()
    keep_to_ourselves(stack)
    model = ensure(OUT / "model", PRESETS["demo"])
    environment = place(stack) | disk(stack)
    daemon = Daemon(environment, OUT / "kvtierd.log")
    stack.callback(daemon.stop)
    engines = Engines(model, environment, stack)

    say("\n1. kvtierd starts, on its defaults, and with a disk that each block is written to at once.")
    daemon.start()
    pool = Path(daemon.status["pool"]["path"])
    say(f"  pool {pool}, socket {daemon.status['socket']}")
    say(f"  disk {environment['KVTIER_DISK_PATHS']}, {DISK_SIZE}")

    say(f"\n2. Engine 1 computes a prompt of {PROMPT_TOKENS} tokens.")
    first = engines.start("engine-1")
    ready(daemon)
    one(first, warm_up)
    settle(daemon)
    before = stored_slots(pool)
    cold = one(first, prompt)
    settle(daemon)
    local = one(first, prompt)
    settle(daemon)
    slots = sorted(stored_slots(pool) - before)
    say(
        f"  cold, after another prompt to warm the engine up: first token after {cold.ttft_s:.3f} s,"
        f" {cold.num_cached_tokens} tokens cached"
    )
    say(f"  again, from its own cache: {local.ttft_s:.3f} s, {local.num_cached_tokens} tokens cached")

    say("\n3. kill -9 of engine 1. The cache stays where it is: in kvtierd.")
    first.kill()
    daemon.wait_for("engine 1 to be forgotten", lambda status: not status.get("instances"))
    daemon.show()

    say("\n4. Engine 2, a new process with an empty cache, gets the same prompt.")
    second = engines.start("engine-2")
    ready(daemon)
    second_warm = list(reversed(warm_up))
    one(second, second_warm)
    settle(daemon)
    restored = one(second, prompt)
    identical = same(restored, local) and restored.num_cached_tokens == local.num_cached_tokens
    say(
        f"  restored: first token after {restored.ttft_s:.3f} s,"
        f" {restored.num_cached_tokens} tokens not computed"
    )
    say(
        "  identical to engine 1's local hit, every token and log probability: "
        + ("yes" if identical else "NO")
    )

    say("\n5. kill -9 of kvtierd, while engine 2 lives and goes on serving.")
    daemon.kill()
    forget(second)
    alone = one(second, prompt)
    say(
        f"  without kvtierd: first token after {alone.ttft_s:.3f} s, {alone.num_cached_tokens} tokens cached;"
        " the engine computes, nothing fails"
    )
    daemon.start()
    say_found(daemon)
    ready(daemon)
    say("  engine 2 has attached again by itself; its own cache is emptied, and it gets the same prompt")
    forget(second)
    after_kill = one(second, prompt)
    survived = same(after_kill, local) and after_kill.num_cached_tokens == local.num_cached_tokens
    say(
        f"  restored: first token after {after_kill.ttft_s:.3f} s,"
        f" {after_kill.num_cached_tokens} tokens not computed; identical: {'yes' if survived else 'NO'}"
    )

    say("\n6. kill -9 of kvtierd, and its pool is deleted: what a reboot of the host leaves is on disk.")
    settle_on_disk(daemon)
    daemon.kill()
    pool.unlink()
    forget(second)
    daemon.start()
    say_found(daemon)
    say(f"  on disk: {on_disk(daemon.status)} blocks found")
    ready(daemon)
    from_disk = one(second, prompt)
    daemon.refresh()
    promoted = int(daemon.status.get("counters", {}).get("promoted_blocks", 0))
    returned = same(from_disk, local) and from_disk.num_cached_tokens == local.num_cached_tokens
    say(
        f"  restored: first token after {from_disk.ttft_s:.3f} s, {from_disk.num_cached_tokens} tokens not"
        f" computed, {promoted} blocks promoted from disk; identical: {'yes' if returned else 'NO'}"
    )
    settle(daemon)
    slots = sorted(stored_slots(pool))

    say(
        "\n7. Would we notice a wrong byte? kvtierd is stopped as for an upgrade, one byte of a stored block"
        " is flipped, and it starts again."
    )
    daemon.drain()
    corrupt(pool, slots[len(slots) // 2])
    daemon.start()
    say_found(daemon)
    ready(daemon)
    forget(second)
    checked = one(second, prompt)
    daemon.refresh()
    refused = int(daemon.status.get("counters", {}).get("integrity_failures", 0))
    changed = not same(checked, local)
    detected = refused > 0 or changed
    say(f"  engine 2 lives and has attached again; blocks refused for a wrong checksum: {refused}")
    if refused:
        say("  it loaded the blocks before that one, and computed the rest itself")
    else:
        say(f"  its output {'changed' if changed else 'DID NOT CHANGE'}")

    say("\n8. A pool that the prompt nearly fills, and no disk: all of it comes back all the same.")
    tight = tight_pool(daemon.status)
    daemon.stop()
    pool.unlink()
    daemon = Daemon(
        environment | {"KVTIER_POOL_SIZE": tight, "KVTIER_DISK_PATHS": ""}, OUT / "kvtierd-tight.log"
    )
    stack.callback(daemon.stop)
    daemon.start()
    ready(daemon)
    forget(second)
    one(second, prompt)
    settle(daemon)
    forget(second)
    large = one(second, prompt)
    settle(daemon)
    used, usable = (int(daemon.status["pool"][name]) for name in ("used_bytes", "capacity_bytes"))
    share = used / usable
    whole = same(large, local) and large.num_cached_tokens == full_tokens
    say(
        f"  pool of {tight}: the prompt's blocks fill {share:.0%} of it;"
        f" {large.num_cached_tokens} tokens not computed; identical: {'yes' if whole else 'NO'}"
    )

    say("\n9. What Prometheus sees.")
    for line in daemon.metric_lines(
        "kvtier_lookup_hits_total",
        "kvtier_store_bytes_total",
        "kvtier_load_bytes_total",
        "kvtier_integrity_failures_total",
        "kvtier_pool_bytes",
        "kvtier_promoted_blocks_total",
    ):
        say(f"  {line}")
    second.stop()
    daemon.stop()

    say("\n10. An API server that starts a daemon itself, and is ended as a user ends it.")
    autostarted = daemon_survives(stack, model, CONNECTOR, prompt, OUT, say)
    return {
        "restored_tokens": restored.num_cached_tokens,
        "expected_tokens": full_tokens,
        "ttft_cold_s": round(cold.ttft_s, 4),
        "ttft_local_hit_s": round(local.ttft_s, 4),
        "ttft_restored_s": round(restored.ttft_s, 4),
        "bit_identical": identical,
        "ttft_without_daemon_s": round(alone.ttft_s, 4),
        "ttft_after_daemon_kill_s": round(after_kill.ttft_s, 4),
        "restored_tokens_after_daemon_kill": after_kill.num_cached_tokens,
        "bit_identical_after_daemon_kill": survived,
        "ttft_from_disk_s": round(from_disk.ttft_s, 4),
        "restored_tokens_from_disk": from_disk.num_cached_tokens,
        "promoted_blocks": promoted,
        "bit_identical_from_disk": returned,
        "negative_control_detected": detected,
        "integrity_failures": refused,
        "large_prefix_restored_tokens": large.num_cached_tokens,
        "large_prefix_share_of_pool": round(share, 3),
        "bit_identical_large_prefix": whole,
        "stored_blocks": len(slots),
        "autostarted_daemon_survived": autostarted,
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Returns what did not hold, in plain sentences. Times are shown and not judged, because a busy machine
    proves nothing."""
    wrong = []
    if figures["restored_tokens"] != figures["expected_tokens"]:
        wrong.append(f"{figures['restored_tokens']} tokens were restored, not {figures['expected_tokens']}")
    if not figures["bit_identical"]:
        wrong.append("the restored output differs from the local hit")
    if not figures["bit_identical_after_daemon_kill"]:
        wrong.append(
            "after kill -9 of kvtierd the engine got"
            f" {figures['restored_tokens_after_daemon_kill']} tokens back, or other ones"
        )
    if not figures["bit_identical_from_disk"] or not figures["promoted_blocks"]:
        wrong.append(
            f"after the pool was deleted the engine got {figures['restored_tokens_from_disk']} tokens back,"
            f" {figures['promoted_blocks']} blocks of it from disk, or other ones"
        )
    if not figures["bit_identical_large_prefix"] or figures["large_prefix_share_of_pool"] < 0.5:
        wrong.append(
            f"of a prompt that fills {figures['large_prefix_share_of_pool']:.0%} of its pool"
            f" {figures['large_prefix_restored_tokens']} tokens came back, or other ones"
        )
    if not figures["negative_control_detected"]:
        wrong.append("a corrupted block was neither refused nor visible")
    if not figures["autostarted_daemon_survived"]:
        wrong.append("a daemon that an API server had started did not outlive it, or did not serve the next")
    return wrong


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Runs the demo and cleans up after it, whatever happens."""
    OUT.mkdir(parents=True, exist_ok=True)
    for log in OUT.glob("*.log"):
        log.unlink()
    # a shell that starts us in the background has it ignored from the start
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        with ExitStack() as stack:
            figures = story(stack)
    except KeyboardInterrupt:
        say("\nInterrupted: engines, daemon and pool are gone.")
        return 130
    except (AssertionError, DemoError, EngineError) as error:
        say(f"\nThe demo failed: {error}")
        return 1
    wrong = verdict(figures)
    speedup = figures["ttft_cold_s"] / figures["ttft_restored_s"]
    say("")
    if wrong:
        say(f"Not proved: {'; '.join(wrong)}. Logs: {OUT.relative_to(REPO)}/")
    else:
        say(
            f"Proved: an engine was killed, and another got {figures['restored_tokens']} tokens back bit for"
            f" bit, with its first token after {figures['ttft_restored_s']:.3f} s instead of"
            f" {figures['ttft_cold_s']:.3f} s ({speedup:.1f} times sooner); the daemon was killed,"
            " and the engine that lived on got them back as well; the pool was deleted, and it got them back"
            " from disk; a corrupted block was refused; a prompt that fills"
            f" {figures['large_prefix_share_of_pool']:.0%} of its pool came back whole; a daemon that an API"
            " server had started outlived it."
            f" Logs: {OUT.relative_to(REPO)}/"
        )
    print(json.dumps(figures), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
