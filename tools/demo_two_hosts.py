"""`make demo-two-hosts`: what an engine of one host has computed, an engine of another host gets back.

Two daemons stand for two hosts: each has a pool and sockets of its own, and they have nothing in common but a
store, here a folder (with KVTIER_STORE_URL and KVTIER_STORE_OPTIONS, a bucket). Everything is real, as in
`make demo`. The last line of the output is one JSON object; the exit status is 0 only if every claim held.
Nothing is left but what lies under build/demo-two-hosts/, and what was put into a bucket.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.vllm.engine import EngineError
from tools import demo
from tools.demo import DemoError, Engines, forget, interrupt, one, ready, same, say, settle
from tools.tiny_llama import PRESETS, ensure

OUT = demo.REPO / "build" / "demo-two-hosts"
URL, OPTIONS = "KVTIER_STORE_URL", "KVTIER_STORE_OPTIONS"


class Host:
    """A daemon in a place of its own, and the engines that use it."""

    def __init__(self, name: str, store: dict[str, str], model: Path, stack: ExitStack) -> None:
        self.name = name
        self._stack = stack
        place = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        self.pool = place / "pool"
        socket = str(place / "kvtierd.sock")
        environment = {
            "KVTIER_SERVER_SOCKET": socket,
            "KVTIER_SOCKET": socket,
            "KVTIER_POOL_PATH": str(self.pool),
            "KVTIER_STORE_LOOK_EVERY_S": "0.5",
            **store,
        }
        self.daemon = demo.Daemon(environment, OUT / f"kvtierd-{name}.log")
        stack.callback(self.daemon.stop)
        self.engines = Engines(model, environment, stack, OUT)
        self.daemon.start()

    @property
    def store(self) -> dict[str, Any]:
        """What its daemon says of the store."""
        found = [disk for disk in self.daemon.refresh().get("disks", ()) if disk.get("shared")]
        if not found:
            raise DemoError(f"host {self.name} has no store; see {OUT}")
        return dict(found[0])

    def wait_for_blocks(self, what: str, count: int) -> None:
        """Returns when the host knows of so many blocks in the store, and puts none there."""
        self.daemon.wait_for(
            what,
            lambda status: any(
                int(disk.get("blocks", 0)) >= count and not int(disk.get("writing_bytes", 0))
                for disk in status.get("disks", ())
                if disk.get("shared")
            ),
        )

    def die(self) -> None:
        """It is gone, with its memory."""
        self.daemon.kill()
        self.pool.unlink()


def the_store(stack: ExitStack) -> dict[str, str]:
    """Returns the environment that names the store."""
    if os.environ.get(URL):
        return {name: os.environ[name] for name in (URL, OPTIONS) if name in os.environ}
    folder = OUT / "store"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return {URL: folder.as_uri()}


def flip(folder: Path) -> int:
    """Flips one byte in the middle of each pack. Returns how many there are."""
    packs = sorted(folder.rglob("*.pack"))
    for pack in packs:
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 0xFF
        pack.write_bytes(data)
    return len(packs)


def story(stack: ExitStack) -> dict[str, Any]:
    """Tells the story, step by step. Returns the figures."""
    full_tokens = (demo.PROMPT_TOKENS - 1) // demo.BLOCK_TOKENS * demo.BLOCK_TOKENS
    blocks = full_tokens // demo.BLOCK_TOKENS
    prompt, warm_up = demo.prompts()
    demo.keep_to_ourselves(stack, OUT)
    model = ensure(OUT / "model", PRESETS["demo"])
    store = the_store(stack)

    say(f"\n1. Two hosts, A and B, with a daemon each. They share {store[URL]}.")
    one_host, other = (Host(name, store, model, stack) for name in "AB")
    for host in (one_host, other):
        say(f"  host {host.name}: pool {host.pool}, the store is {host.store.get('state')}")

    say(f"\n2. An engine on host A computes a prompt of {demo.PROMPT_TOKENS} tokens.")
    first = one_host.engines.start("engine-on-A")
    ready(one_host.daemon)
    one(first, warm_up)
    settle(one_host.daemon)
    cold = one(first, prompt)
    settle(one_host.daemon)
    local = one(first, prompt)
    say(f"  cold: first token after {cold.ttft_s:.3f} s, {cold.num_cached_tokens} tokens cached")
    say(f"  again, from its own cache: {local.ttft_s:.3f} s, {local.num_cached_tokens} tokens cached")
    say(f"  in the store so far: {one_host.store.get('blocks', 0)} blocks, for nobody has asked again")

    say("\n3. The prompt comes again, and is found in host A's memory: now it is worth sharing.")
    forget(first)
    found = one(first, prompt)
    say(f"  from memory: {found.ttft_s:.3f} s, {found.num_cached_tokens} tokens not computed")
    one_host.wait_for_blocks("the blocks to be in the store", blocks)
    put = int(one_host.store.get("written_bytes", 0))
    say(f"  in the store: {one_host.store.get('blocks', 0)} blocks, {put / (1 << 20):.1f} MiB")

    say("\n4. kill -9 of everything on host A, and its memory is gone.")
    first.kill()
    one_host.die()

    say("\n5. An engine on host B, where nobody has ever seen the prompt.")
    second = other.engines.start("engine-on-B")
    ready(other.daemon)
    one(second, list(reversed(warm_up)))
    settle(other.daemon)
    other.wait_for_blocks("host B to know of them", blocks)
    restored = one(second, prompt)
    identical = same(restored, local) and restored.num_cached_tokens == local.num_cached_tokens
    say(
        f"  restored: first token after {restored.ttft_s:.3f} s, {restored.num_cached_tokens} tokens not"
        f" computed; identical to host A's local hit: {'yes' if identical else 'NO'}"
    )

    figures = {
        "tokens_from_memory": found.num_cached_tokens,
        "restored_tokens": restored.num_cached_tokens,
        "expected_tokens": full_tokens,
        "ttft_cold_s": round(cold.ttft_s, 4),
        "ttft_from_memory_s": round(found.ttft_s, 4),
        "ttft_on_other_host_s": round(restored.ttft_s, 4),
        "bit_identical": identical,
        "stored_bytes": put,
    }
    if URL in os.environ:
        return figures

    say("\n6. Would host B notice a wrong byte? One is flipped in each object, and B loses its memory.")
    settle(other.daemon)
    other.die()
    packs = flip(Path(store[URL].removeprefix("file://")))
    forget(second)
    other.daemon.start()
    ready(other.daemon)
    other.wait_for_blocks("host B to know of them again", blocks)
    checked = one(second, prompt)
    refused = int(other.store.get("corrupt_blocks", 0))
    say(f"  bytes flipped: {packs}; blocks refused for a wrong checksum: {refused}")
    say(f"  the engine loaded {checked.num_cached_tokens} tokens, and computed the rest itself")

    say("\n7. The store goes away: what host B has in memory is served as ever.")
    settle(other.daemon)
    shutil.rmtree(Path(store[URL].removeprefix("file://")))
    forget(second)
    alone = one(second, prompt)
    say(f"  from memory: {alone.ttft_s:.3f} s, {alone.num_cached_tokens} tokens not computed")
    second.stop()
    return figures | {
        "flipped_packs": packs,
        "refused_blocks": refused,
        "tokens_without_store": alone.num_cached_tokens,
    }


def verdict(figures: dict[str, Any]) -> list[str]:
    """Returns what did not hold, in plain sentences."""
    wrong = []
    if figures["tokens_from_memory"] != figures["expected_tokens"]:
        wrong.append(f"{figures['tokens_from_memory']} tokens came from host A's own memory")
    if figures["restored_tokens"] != figures["expected_tokens"]:
        wrong.append(f"{figures['restored_tokens']} tokens came back, not {figures['expected_tokens']}")
    if not figures["bit_identical"]:
        wrong.append("host B's answer differs from host A's")
    if figures.get("refused_blocks", 1) < 1:
        wrong.append("a flipped byte in the store was not noticed")
    if figures.get("tokens_without_store", figures["expected_tokens"]) != figures["expected_tokens"]:
        wrong.append(f"without the store only {figures['tokens_without_store']} tokens came from memory")
    return wrong


def main() -> int:
    """Runs the demo and cleans up after it, whatever happens."""
    OUT.mkdir(parents=True, exist_ok=True)
    for log in OUT.glob("*.log"):
        log.unlink()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        with ExitStack() as stack:
            figures = story(stack)
    except KeyboardInterrupt:
        say("\nInterrupted: engines, daemons and pools are gone.")
        return 130
    except (AssertionError, DemoError, EngineError) as error:
        say(f"\nThe demo failed: {error}")
        return 1
    wrong = verdict(figures)
    if wrong:
        say(f"\nNot proved: {'; '.join(wrong)}. Logs: {OUT.relative_to(demo.REPO)}/")
    else:
        sooner = figures["ttft_cold_s"] / figures["ttft_on_other_host_s"]
        say(
            f"\nProved: host B got {figures['restored_tokens']} of {demo.PROMPT_TOKENS} tokens that only host"
            f" A had computed, bit for bit, {sooner:.1f} times as soon as by computing them."
            f" Logs: {OUT.relative_to(demo.REPO)}/"
        )
    say(json.dumps(figures))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
