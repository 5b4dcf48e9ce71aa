"""The client library of Mooncake Store, as the driver uses it: a pure client, without memory for others.

All of it blocks, and is called in threads. What the library answers is a number, negative if it has failed;
here that is a StoreError. `mooncake_store.py` has what an object is.
"""

import contextlib
import importlib
import math
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtierd.tiers.store.objects import StoreError, StoreTrouble
from kvtierd.tiers.store.threads import BlockingCall

HOW_TO_INSTALL: Final = (
    "install it where the daemon is (pip install 'mooncake-transfer-engine-non-cuda>=0.3.13', or another "
    "build of it, and Debian's libibverbs1 and librdmacm1, which all builds need)"
)
# The library reads this when it is loaded. Its usual level has some lines for each start and end of a client.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
try:
    _library: Any = importlib.import_module("mooncake.store")
except ImportError as error:
    raise ImportError(f"{HOW_TO_INSTALL}: {error}") from error
if not hasattr(_library.MooncakeDistributedStore, "batch_put_session_start"):
    raise ImportError(f"the mooncake.store that is here is too old, it has no put sessions: {HOW_TO_INSTALL}")

MIB: Final = 1 << 20
LOCAL_BUFFER_BYTES: Final = 1 * MIB
"""The library's own buffer, which none of the calls here use."""
KEPT_BYTES_MAX: Final = 64 * MIB
"""So much registered memory is kept for the next calls."""
RANGES_AT_ONCE: Final = 128
"""In one call of the library: with some thousands its queue for TCP runs over, and the call never ends."""
KEYS_AT_ONCE: Final = 2_000
"""Of which the master is asked at once whether they exist."""

_NOT_THERE: Final = frozenset({-703, -704, -710, -712})
"""Replica not ready, object not found, replica not found, replica gone."""
EXISTS: Final = -705
_INVALID: Final = -600
_FULL: Final = frozenset({-200})
_HELD: Final = frozenset({-706, -708, -714})
"""It is leased, being copied, or being read."""
_UNANSWERED: Final = frozenset({-707, -800, -900, -901})
"""The lease ended before the transfer, the transfer failed, the call failed, it timed out."""
_SAID: Final = {
    -200: "no memory is left, or no client has given any yet",
    -600: "a parameter is invalid",
    -704: "no such object",
    -706: "it is leased to a reader",
    -707: "the lease ended before the transfer did",
    -708: "it is being copied",
    -714: "it is being read",
    -800: "the transfer failed: the client that has the memory does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer",
}

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MooncakePlace:
    """Where a Mooncake cluster is, and how this host takes part in it."""

    master_host: str
    master_port: int
    metadata_server: str
    protocol: str
    devices: str
    """Names of RDMA devices with commas between them; empty for the library's choice."""
    host: str
    """The name or address by which other hosts reach this one; empty for the address that reaches the
    master."""
    replicas: int

    @property
    def master(self) -> str:
        """As the library wants it."""
        host = f"[{self.master_host}]" if ":" in self.master_host else self.master_host
        return f"{host}:{self.master_port}"


class MooncakeClient:
    """Connects with its first call, and again by itself. Safe for several threads."""

    def __init__(self, place: MooncakePlace, deadline_s: float) -> None:
        self._place = place
        # The library would wait for minutes in places. It reads these when a client is made; whoever has set
        # one of them for the daemon knows better.
        whole_s = max(1, math.ceil(deadline_s))
        for name, value in (
            ("MC_RPC_TIMEOUT_MS", 1_000 * whole_s),
            ("MC_RPC_CONNECT_TIMEOUT_MS", 1_000 * whole_s),
            ("MC_TCP_PROGRESS_TIMEOUT_SEC", whole_s),
            ("MC_TCP_STATUS_TIMEOUT_SEC", whole_s),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", whole_s),
            ("MC_STORE_CLIENT_SETUP_RETRIES", 1),
        ):
            os.environ.setdefault(name, str(value))
        self._connecting = threading.Lock()
        self._store: Any = None
        self._memory: RegisteredMemory | None = None
        self._making_lock = threading.Lock()
        self._making: set[str] = set()
        """Keys that the library has in hand. What it could not give up, because the master did not answer, it
        never takes again."""
        self._config = self._new_config()
        self._pinned = self._new_config()
        self._pinned.soft_pin_action = _library.SoftPinAction.ENABLE

    def _new_config(self) -> Any:
        config = _library.ReplicateConfig()
        config.replica_num = self._place.replicas
        return config

    def connect(self, call: BlockingCall) -> Any:
        """The library's object, connected. Raises StoreError LATE if the master cannot be reached."""
        if self._store is None:
            if not self._connecting.acquire(timeout=call.left_s):
                raise StoreError(StoreTrouble.LATE, f"{call.name}: still connecting to {self._place.master}")
            try:
                if self._store is None:
                    self._connect(call)
            finally:
                self._connecting.release()
        return self._store

    def _connect(self, call: BlockingCall) -> None:
        place = self._place
        # A client's own attempt takes much longer to fail than this one.
        try:
            address = (place.master_host, place.master_port)
            with socket.create_connection(address, timeout=call.left_s) as reached:
                own = place.host or reached.getsockname()[0]
        except OSError as error:
            said = f"no connection to the master at {place.master} ({error})"
            raise StoreError(StoreTrouble.LATE, f"{call.name}: {said}") from None
        store = _library.MooncakeDistributedStore()
        status = store.setup(
            own, place.metadata_server, 0, LOCAL_BUFFER_BYTES, place.protocol, place.devices, place.master
        )
        if status:
            said = (
                f"Mooncake's client cannot be set up ({status}) with the master {place.master}, "
                f"metadata_server={place.metadata_server}, protocol={place.protocol}, "
                f"devices={place.devices}, host={own}"
            )
            raise StoreError(StoreTrouble.LATE, f"{call.name}: {said}")
        self._memory = RegisteredMemory(store)
        self._store = store

    def take(self, call: BlockingCall, size_bytes: int) -> Memory:
        """Registered memory of at least this size. It is used again when nobody has a view of it any more."""
        self.connect(call)
        assert self._memory is not None
        return self._memory.take(size_bytes)

    # --- objects ---

    def create(self, call: BlockingCall, key: str, data: Memory, *, pinned: bool = False) -> bool:
        """Makes an object of what is in registered memory. Returns False if there is one, or if one is just
        being made. Raises StoreError; then there is none, or, if the master did not answer at the end, a
        whole one."""
        store = self.connect(call)
        with self._making_lock:
            if key in self._making:
                return False
            self._making.add(key)
        [status] = store.batch_put_session_start([key], [len(data)], self._pinned if pinned else self._config)
        if status:
            self._making.discard(key)
            if status == EXISTS:
                return False
            _raise_if(status, key)
        try:
            call.go_on()
            [written] = store.batch_put_from_multi_buffer_ranges(
                [key], [[data.ctypes.data]], [[len(data)]], [[0]]
            )
            if written != len(data):
                _raise_if(min(written, -1), key)
            call.go_on()
            [status] = store.batch_put_session_end([key])
            _raise_if(status, key)
        except StoreError:
            [revoked] = store.batch_put_session_revoke([key])
            if not revoked:
                self._making.discard(key)
            raise
        self._making.discard(key)
        return True

    def size_of(self, call: BlockingCall, key: str) -> int:
        """The length of an object. Raises StoreError, MISSING if there is none."""
        size = int(self.connect(call).get_size(key))
        _raise_if(size, key)
        return size

    def read(
        self, call: BlockingCall, key: str, into: Memory, ranges: Sequence[tuple[int, int, int]]
    ) -> None:
        """Reads ranges of an object, each given by its place in the memory, its offset and its length, which
        must be within the object. Raises StoreError, MISSING if there is none."""
        store = self.connect(call)
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            call.go_on()
            some = ranges[first : first + RANGES_AT_ONCE]
            places, begins, sizes = (list(each) for each in zip(*some, strict=True))
            [[found]] = store.get_into_ranges([into.ctypes.data], [[key]], [[places]], [[begins]], [[sizes]])
            if found != sizes:
                status = min(*found, -1)
                if status == _INVALID:
                    raise StoreError(StoreTrouble.MISSING, f"{key}: it ends before what was asked for")
                _raise_if(status, key)

    def exist(self, call: BlockingCall, keys: Sequence[str]) -> list[bool]:
        """Whether there are such objects. Those that are there are leased by that. Raises StoreError."""
        store = self.connect(call)
        there: list[bool] = []
        for first in range(0, len(keys), KEYS_AT_ONCE):
            call.go_on()
            some = store.batch_is_exist(list(keys[first : first + KEYS_AT_ONCE]))
            _raise_if(min(some), keys[first])
            there += (each == 1 for each in some)
        return there

    def read_small(self, call: BlockingCall, keys: Sequence[str], size_bytes: int) -> list[bytes | None]:
        """The whole content of objects of this length; None for those that are not there, or of another
        length. Raises StoreError."""
        store = self.connect(call)
        whole: list[bytes | None] = []
        for first in range(0, len(keys), RANGES_AT_ONCE):
            call.go_on()
            some = list(keys[first : first + RANGES_AT_ONCE])
            memory = self.take(call, len(some) * size_bytes)
            places = [memory.ctypes.data + at * size_bytes for at in range(len(some))]
            found = store.batch_get_into(some, places, [size_bytes] * len(some))
            for at, (key, status) in enumerate(zip(some, found, strict=True)):
                if status in _UNANSWERED:
                    _raise_if(status, key)
                right = status == size_bytes
                whole.append(memory[at * size_bytes : (at + 1) * size_bytes].tobytes() if right else None)
        return whole

    def remove(self, call: BlockingCall, key: str) -> None:
        """Removes an object, if there is one. Raises StoreError, LATE while it is leased."""
        status = self.connect(call).remove(key)
        if status not in _NOT_THERE:
            _raise_if(status, key)

    def remove_if_possible(self, call: BlockingCall, key: str) -> None:
        """Removes an object that nobody is to find."""
        with contextlib.suppress(StoreError):
            self.remove(call, key)

    def close(self) -> None:
        """Leaves the cluster."""
        store, self._store, self._memory = self._store, None, None
        if store is not None:
            store.close()


class RegisteredMemory:
    """Memory that the library may read and write by itself, kept for the next calls, because to register it
    takes long with RDMA. Safe for several threads."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    def take(self, size_bytes: int) -> Memory:
        """Memory of exactly this size. It is used again when nobody has a view of it any more."""
        size_bytes = max(1, size_bytes)
        with self._lock:
            fitting = [slab for slab in list(self._free) if len(slab) >= size_bytes]
            slab = min(fitting, key=len, default=None)
            if slab is not None:
                self._free.remove(slab)
            too_many = []
            while sum(map(len, list(self._free))) > KEPT_BYTES_MAX:
                too_many.append(self._free.pop(0))
        for each in too_many:
            self._store.unregister_buffer(np.frombuffer(each, np.uint8).ctypes.data)
        if slab is None:
            slab = mmap.mmap(-1, -(-size_bytes // MIB) * MIB)
            whole = np.frombuffer(slab, np.uint8)
            _raise_if(self._store.register_buffer(whole.ctypes.data, len(whole)), "register_buffer")
            del whole
        taken = np.frombuffer(slab, np.uint8, size_bytes)
        # All views of it, and theirs, keep this array alive. The last may go at any time and in any thread,
        # also in one that has the lock: so that only appends.
        weakref.finalize(taken, self._free.append, slab).atexit = False
        return taken


def fill(memory: Memory, parts: Iterable[memoryview]) -> None:
    """Copies parts into memory, one after the other."""
    at = 0
    for part in parts:
        if len(part):
            # numpy lets other threads run meanwhile, which the slices of a memoryview do not.
            memory[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
            at += part.nbytes


def _raise_if(status: int, key: str) -> None:
    """Raises what a negative answer of the library means."""
    if status >= 0:
        return
    if status in _NOT_THERE:
        trouble = StoreTrouble.MISSING
    elif status in _FULL:
        trouble = StoreTrouble.FULL
    elif status in _HELD or status in _UNANSWERED:
        trouble = StoreTrouble.LATE
    else:
        trouble = StoreTrouble.OTHER
    raise StoreError(trouble, f"{key}: {_SAID.get(status, 'Mooncake has failed')} ({status})")
