"""An engine with a KV cache on the GPU and a client of kvtierd. Contents follow from names, so that any wrong
byte shows, whoever loads it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier import Client, Doorbell, Namespace, Outcome, Transfer
from kvtier.cuda import DeviceMemory, MirrorMemory, NotExportableError

from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import take_device
from tests.gpu.parts.engine_memory import MIRROR, WITH_TORCH, EngineMemory, make_memory
from tests.gpu.parts.engine_rig import DEADLINE_S, EngineCache
from tests.gpu.parts.engine_work import CopyWork, KernelWork, Work

U8 = npt.NDArray[np.uint8]
POISON = 0x3F


def block_hash(family: str, number: int) -> bytes:
    """Of one block of a family."""
    return hashlib.sha256(f"{family}/{number}".encode()).digest()


def content(value: bytes, n: int) -> U8:
    """The bytes that the block with this hash has."""
    return np.frombuffer(np.random.default_rng(np.frombuffer(value, np.uint8)).bytes(n), np.uint8)


class KvEngine:
    """Answers the questions named in `handlers`."""

    def open(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Makes memory of a kind, and a client of the daemon with it."""
        self._kind: str = fields["kind"]
        if self._kind in WITH_TORCH:
            import torch

            torch.empty(1, device="cuda")  # the primary context is torch's, as in an engine
        self._device = take_device()
        self._shape = fields["num_blocks"], fields["planes"], fields["fragment_bytes"]
        self._long_bytes: int = fields["long_bytes"]
        self._churning: threading.Thread | None = None
        self._rung = 0
        self._make_memory()
        try:
            DeviceMemory(self._memory.address, self._cache.n).check()
        except NotExportableError as error:
            if self._kind != MIRROR:
                return {"ready": False, "why": str(error), "not_exportable": True}
        self._client = Client(
            instance=fields["instance"],
            namespace=Namespace(model="tests/gpu", kv_dtype="uint8", hash_scheme="tests:name"),
            groups=[self._cache.group()],
            memory=self._shared(),
            socket=fields["socket"],
        )
        return self.wait_ready(fields, fds)

    def wait_ready(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Until everything works, or says why not."""
        ready = self._client.wait_ready(DEADLINE_S)
        return {"ready": ready, "why": str(self._client.status.why)}

    def store(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Fills blocks `ids` with the contents of `family`'s `numbers`, and stores them. With `late`, the
        stream writes them behind something long, and rings when it has."""
        hashes, ids = self._hashes(fields), fields["ids"]
        if not fields.get("late"):
            for value, block in zip(hashes, ids, strict=True):
                self._cache.write_block(block, content(value, self._cache.block_bytes))
            if self._mirror is None:
                return self._told(self._client.store(hashes, ids))
            self._mirror.copy_out(ids)
            told = self._told(self._client.store(hashes, ids))
            self._mirror.discard(ids)
            return told
        self._work.prepare(self._stacked([content(value, self._cache.block_bytes) for value in hashes]))
        self._cache.wipe(POISON)
        return self._behind_work(ids, lambda bell: self._client.store(hashes, ids, doorbell=bell))

    def load(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Wipes the cache, loads `family`'s `numbers` into blocks `ids`, and compares every byte of the
        cache. With `late`, the stream overwrites those blocks behind something long, and rings when it
        has."""
        hashes, ids = self._hashes(fields), fields["ids"]
        self._cache.wipe(POISON)
        hit = self._client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
        if hit.hits < len(hashes):
            hit.release()
            return {"hits": hit.hits}
        if fields.get("late"):
            self._work.prepare(np.zeros((len(ids), *self._shape[1:]), np.uint8))
            told = self._behind_work(ids, lambda bell: self._client.load(hit, ids, doorbell=bell))
        else:
            if self._mirror is not None:
                self._mirror.populate(ids)
            told = self._told(self._client.load(hit, ids))
            if self._mirror is not None and told["done"]:
                self._mirror.copy_in(ids)
        return {"hits": hit.hits, **told, **self._compared(hashes, ids)}

    def churn(self, fields: dict[str, Any], fds: list[int]) -> None:
        """From now on stores and loads in a thread, whatever becomes of it, until the process is killed."""
        family = fields["family"]

        def run() -> None:
            number = 0
            half = self._shape[0] // 2
            while True:
                hashes = [block_hash(family, number + index) for index in range(half)]
                number += half
                self._client.store(hashes, range(half)).wait(DEADLINE_S)
                with self._client.lookup(hashes, lease=True) as hit:
                    if hit.hits:
                        self._client.load(hit, range(half, half + hit.hits)).wait(DEADLINE_S)

        self._churning = threading.Thread(target=run, daemon=True)
        self._churning.start()

    def begin_load(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Begins to load all it can of `family` into the cache; answers as soon as bytes have arrived."""
        hashes, ids = self._hashes(fields), fields["ids"]
        self._cache.wipe(POISON)
        hit = self._client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
        self._open = self._client.load(hit, ids[: hit.hits])
        self._await_bytes(ids)
        return {"hits": hit.hits}

    def outcome(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """How that load ended, and whether the cache still changed after its fence."""
        told = self._told(self._open)
        before = self._cache.contents()
        time.sleep(0.3)
        return {**told, "changed": int(np.count_nonzero(before != self._cache.contents()))}

    def sleep(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Gives the cache's memory back to the driver, and takes other memory in its place."""
        released = self._client.release_memory(DEADLINE_S)
        self._work.close()
        used = self._device.used_bytes()
        self._memory.close()
        freed = used - self._device.used_bytes()
        self._make_memory()
        self._client.register_memory(self._shared())
        return {"released": released, "freed": freed, **self.wait_ready(fields, fds)}

    def used(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Bytes of the GPU in use by anybody."""
        return {"bytes": self._device.used_bytes()}

    def close(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        return {"fenced": self._client.close(DEADLINE_S)}

    # --- inside ---

    def _make_memory(self) -> None:
        blocks, planes, fragment = self._shape
        self._memory: EngineMemory = make_memory(self._kind, self._device, blocks * planes * fragment)
        self._cache = EngineCache(self._device, *self._shape, address=self._memory.address)
        self._work: Work = (
            CopyWork(self._device, self._cache, self._long_bytes)
            if self._memory.tensor is None
            else KernelWork(self._cache, self._memory.tensor)
        )

    def _await_bytes(self, ids: Sequence[int]) -> None:
        """Until one of these blocks no longer begins with poison, or the load has ended."""
        some = ids[:: max(1, len(ids) // 16)]
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end and not self._open.ended:
            for block in some:
                if not np.all(self._device.read(self._cache.fragment_address(0, block), 64) == POISON):
                    return

    def _shared(self) -> DeviceMemory | MirrorMemory:
        """What the client is given as its memory."""
        memory = DeviceMemory(self._memory.address, self._cache.n)
        self._mirror = MirrorMemory(memory, [self._cache.group()]) if self._kind == MIRROR else None
        return self._mirror or memory

    def _hashes(self, fields: dict[str, Any]) -> list[bytes]:
        return [block_hash(fields["family"], number) for number in fields["numbers"]]

    def _stacked(self, contents: Sequence[U8]) -> U8:
        return np.stack(contents).reshape(len(contents), *self._shape[1:])

    def _behind_work(self, ids: Sequence[int], submit: Any) -> dict[str, Any]:
        """Submits with a doorbell, lets the stream work on the blocks, and has it ring."""
        self._rung += 1
        transfer = submit(Doorbell(0, self._rung))
        self._work.write_late(ids)
        self._client.ring_on(self._work.stream, 0, self._rung)
        still_running = self._work.running()
        return {"was_running": still_running, **self._told(transfer)}

    def _told(self, transfer: Transfer) -> dict[str, Any]:
        outcome: Outcome = transfer.wait(DEADLINE_S)
        return {"done": outcome.done, "fenced": outcome.fenced, "said": str(outcome)}

    def _compared(self, hashes: Sequence[bytes], ids: Sequence[int]) -> dict[str, Any]:
        """Which blocks have other bytes than they should, and how many bytes of other blocks were touched."""
        found = self._cache.contents()
        wrong = []
        for value, block in zip(hashes, ids, strict=True):
            expected = content(value, self._cache.block_bytes).reshape(self._shape[1:])
            if not np.array_equal(found[:, block], expected):
                wrong.append(block)
        others = np.delete(found, ids, axis=1)
        return {"wrong": wrong, "touched": int(np.count_nonzero(others != POISON))}


def handlers() -> dict[str, Handler]:
    engine = KvEngine()
    names = "open wait_ready store load churn begin_load outcome sleep used close"  # one method each
    return {name: getattr(engine, name) for name in names.split()}
