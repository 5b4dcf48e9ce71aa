"""docs/protocol.md, proved: the client in C++ that was written from it shares blocks with the Python client.

Needs g++, make, and gRPC for C++, of the system or, where it has none, unpacked from Debian's packages below
build/. Skipped where neither can be had.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from kvtier import Client, Group, Lookup, Namespace, Plane, SharedBuffer
from kvtier.v1 import cache_pb2, side_pb2, types_pb2
from kvtierd.config.daemon import ServerConfig
from kvtierd.core.stimuli import CoreLimits
from kvtierd.rpc.hello import FEATURES

from tests.deploy.installation import PLACE, REPO
from tests.integration.daemon.raw import RawSession
from tests.support.daemon import DaemonHost, until
from tests.support.process import DEADLINE_S, readable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOURCE = REPO / "examples" / "cpp-client"
PAGE = (REPO / "docs" / "protocol.md").read_text()
SYSROOT = PLACE / "debian" / "grpc-cpp"
PACKAGES = ("libgrpc++-dev", "libprotobuf-dev", "protobuf-compiler", "protobuf-compiler-grpc", "pkgconf")
OF_GRPC = re.compile(r"lib(absl|c-ares|grpc|pkgconf|protobuf|protoc|re2|ssl|upb|utf8)|protobuf-|zlib|pkgconf")
"""Of what those need: the rest every machine with g++ has."""
BUILD_TIMEOUT_S = 600

FRAGMENTS = {"keys": 4_096, "values": 1_000, "scales": 64}
"""Planes of the C++ client's cache, in which they lie block by block; here plane by plane."""
BLOCK_BYTES = sum(FRAGMENTS.values())
BLOCKS = 48
READY_S = 60.0
CHURN_S = 12
SLOW_S = 3


# --- the toolchain ---


def run(*command: str | Path, **more: str) -> str:
    """What it prints. Raises CalledProcessError."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=True,
        timeout=BUILD_TIMEOUT_S,
        env=os.environ | more,
    )
    return done.stdout


def unpacked() -> Path:
    """Where gRPC for C++ lies as Debian ships it; nothing of it is installed. Raises what went wrong."""
    if not SYSROOT.exists():
        making = SYSROOT.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        without = [f"--no-{kind}" for kind in kinds]
        needed = run("apt-cache", "depends", "--recurse", *without, *PACKAGES)
        names = sorted({line for line in needed.splitlines() if OF_GRPC.match(line)})
        subprocess.run(["apt-get", "download", *names], cwd=making, check=True, capture_output=True)
        for package in making.glob("*.deb"):
            run("dpkg-deb", "--extract", package, making)
            package.unlink()
        making.rename(SYSROOT)
    return SYSROOT


def toolchain() -> tuple[list[str], dict[str, str]]:
    """Variables of make and of its environment. Raises what went wrong."""
    try:
        run("pkg-config", "--exists", "grpc++", "protobuf")
        if shutil.which("protoc") and shutil.which("grpc_cpp_plugin"):
            return [], {}
    except (OSError, subprocess.CalledProcessError):
        pass
    root = unpacked()
    [libraries] = root.glob("usr/lib/*-linux-gnu")
    variables = [
        f"PROTOC={root}/usr/bin/protoc",
        f"GRPC_PLUGIN={root}/usr/bin/grpc_cpp_plugin",
        f"PKG_CONFIG={root}/usr/bin/pkgconf",
        # Libraries that are needed by libraries are found by the older kind of these tags only.
        f"LDFLAGS=-L{libraries} -Wl,--disable-new-dtags,-rpath,{libraries}",
    ]
    environment = {
        "LD_LIBRARY_PATH": str(libraries),
        "PKG_CONFIG_SYSROOT_DIR": str(root),
        "PKG_CONFIG_LIBDIR": f"{libraries}/pkgconfig:{root}/usr/share/pkgconfig",
    }
    return variables, environment


@pytest.fixture(scope="module")
def program() -> Path:
    """The client in C++, built."""
    for tool in ("g++", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: the client in C++ cannot be built")
    try:
        variables, environment = toolchain()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        pytest.skip(
            "gRPC for C++ cannot be had: it is not installed, and `apt-get download` does not bring it "
            f"(run `apt-get update`?): {error} {said}"
        )
    build = PLACE / "cpp-client"
    try:
        run("make", "-C", SOURCE, f"-j{os.cpu_count()}", f"BUILD={build}", *variables, **environment)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the client in C++ does not build:\n{error.stdout}{error.stderr}")
    return build / "kvtier-client"


# --- both clients ---


class CppClient:
    """The program: a command a line, an answer a line."""

    def __init__(self, program: Path, host: DaemonHost, folder: Path, instance: str, tenant: str) -> None:
        self._folder = folder
        self._errors = (folder / f"{instance}.stderr").open("w+")
        self._process = subprocess.Popen(
            [str(program), str(host.socket), instance, tenant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def say(self, command: str, *more: object) -> str:
        """Its answer."""
        self.ask(command, *more)
        return self.answer(command)

    def ask(self, command: str, *more: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(map(str, (command, *more)))}\n".encode())
        self._process.stdin.flush()

    def answer(self, command: str) -> str:
        assert self._process.stdout is not None
        assert readable(self._process.stdout.fileno(), DEADLINE_S), f"{command}: no answer"
        answer: str = self._process.stdout.readline().decode().rstrip("\n")
        assert answer, f"{command}: it has ended: {self.errors()}"
        return answer

    def ready(self) -> int:
        """Its epoch."""
        said = self.say("ready", int(READY_S))
        assert said.startswith("ready "), said
        return int(said.split()[1])

    def fill(self, first: int, contents: Sequence[bytes]) -> None:
        path = self._folder / "blocks-in"
        path.write_bytes(b"".join(contents))
        assert self.say("read", path, first) == f"read {len(contents)}"

    def contents(self, first: int, count: int) -> list[bytes]:
        path = self._folder / "blocks-out"
        assert self.say("write", path, first, count) == f"wrote {count}"
        data = path.read_bytes()
        return [data[at : at + BLOCK_BYTES] for at in range(0, count * BLOCK_BYTES, BLOCK_BYTES)]

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> int:
        """Its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            return self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._errors.close()


class PythonClient:
    """The same cache, laid out in another way."""

    def __init__(self, host: DaemonHost, instance: str, tenant: str) -> None:
        self.memory = SharedBuffer.create(BLOCKS * BLOCK_BYTES)
        self._planes, at = [], 0
        planes = []
        for name, size in FRAGMENTS.items():
            planes.append(
                Plane(fragment_bytes=size, base_offset=at, block_stride_bytes=size, description=name)
            )
            self._planes.append(self.memory.array[at : at + BLOCKS * size].reshape(BLOCKS, size))
            at += BLOCKS * size
        self.group = Group(block_tokens=16, num_blocks=BLOCKS, planes=tuple(planes))
        self.namespace = Namespace(
            model="examples/three-planes",
            kv_dtype="uint8",
            hash_scheme="examples:any",
            hash_bytes=32,
            tenant=tenant,
        )
        self.client = Client(
            instance=instance,
            namespace=self.namespace,
            groups=[self.group],
            memory=self.memory,
            socket=host.socket,
            program="tests",
        )
        assert self.client.wait_ready(READY_S), self.client.status

    def fill(self, first: int, contents: Sequence[bytes]) -> None:
        for block, content in enumerate(contents, first):
            at = 0
            for plane in self._planes:
                size = plane.shape[1]
                plane[block] = np.frombuffer(content[at : at + size], np.uint8)
                at += size

    def contents(self, first: int, count: int) -> list[bytes]:
        blocks = range(first, first + count)
        return [b"".join(plane[block].tobytes() for plane in self._planes) for block in blocks]

    def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        found: list[Lookup] = []

        def answered() -> bool:
            found.append(self.client.lookup(hashes, lease=True, timeout_s=READY_S))
            return found[-1].answered

        until(answered, "the daemon answers")
        return found[-1]

    def close(self) -> None:
        assert self.client.close()
        self._planes.clear()
        self.memory.close()


@pytest.fixture
def host(socket_dir: Path, shm_dir: Path) -> Iterator[DaemonHost]:
    host = DaemonHost(socket_dir, shm_dir / "pool")
    host.start()
    yield host
    host.stop()


@pytest.fixture
def cpp(program: Path, host: DaemonHost, tmp_path: Path) -> Iterator[CppClient]:
    client = CppClient(program, host, tmp_path, "in C++", "both")
    yield client
    said = client.errors()
    assert (client.close(), said) == (0, "")


@pytest.fixture
def python(host: DaemonHost) -> Iterator[PythonClient]:
    client = PythonClient(host, "in Python", "both")
    yield client
    client.close()


def blocks(name: str, count: int) -> tuple[list[bytes], list[bytes]]:
    """Hashes of a prefix, and what its blocks hold."""
    hashes = [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]
    random = np.random.default_rng(np.frombuffer(hashes[0], np.uint8))
    return hashes, [random.bytes(BLOCK_BYTES) for _ in hashes]


def hexes(hashes: Sequence[bytes]) -> list[str]:
    return [each.hex() for each in hashes]


# --- blocks cross from one to the other ---


def test_blocks_that_python_has_stored_are_loaded_in_cpp_with_every_byte(
    cpp: CppClient, python: PythonClient
) -> None:
    cpp.ready()
    hashes, contents = blocks("of Python", 12)
    python.fill(20, contents)
    assert python.client.store(hashes, range(20, 32)).wait(READY_S).done
    assert cpp.say("wipe") == "wiped"
    assert cpp.say("load", 5, *hexes(hashes)) == f"DONE succeeded {'1' * 12}"
    assert cpp.contents(5, 12) == contents


def test_blocks_that_cpp_has_stored_are_loaded_in_python_with_every_byte(
    cpp: CppClient, python: PythonClient
) -> None:
    cpp.ready()
    hashes, contents = blocks("of C++", 12)
    cpp.fill(40, contents)
    stored = cpp.say("store", 40, *hexes(hashes))
    assert stored == f"DONE succeeded {'1' * 12} results {'0' * 12}"
    with python.lookup([*hashes, b"\0" * 32]) as found:
        assert found.hits == 12
        assert python.client.load(found, range(12)).wait(READY_S).done
    assert python.contents(0, 12) == contents
    # It is there already, whoever comes with it; and a block that one store names twice is copied once.
    new, _ = blocks("new", 1)
    again = cpp.say("store", 40, *hexes([hashes[0], new[0], new[0]]))
    assert again == "DONE succeeded 110 results 102"


def test_both_are_known_by_the_same_digests_which_are_computed_as_the_page_says(
    cpp: CppClient, python: PythonClient
) -> None:
    cpp.ready()
    planes = b"".join(struct.pack("<QI", size, len(name)) + name.encode() for name, size in FRAGMENTS.items())
    layout = hashlib.sha256(
        b"kvtier layout 1\0"
        + struct.pack("<IQQQI", 1, types_pb2.GROUP_KIND_FULL_ATTENTION, 16, 0, 3)
        + planes
    ).digest()[:16]
    said = python.namespace
    texts = ((1, said.model), (3, said.kv_dtype), (6, said.hash_scheme), (8, said.tenant))
    fields = {number: text.encode() for number, text in texts} | {7: struct.pack("<Q", 32)}
    canonical = b"kvtier-namespace-1" + b"".join(
        struct.pack("<IQ", number, len(content)) + content for number, content in sorted(fields.items())
    )
    tenant = f"uid:{os.getuid()}".encode()
    sized = b"".join(struct.pack("<Q", len(part)) + part for part in (tenant, canonical))
    digest = hashlib.sha256(b"kvtier namespace 2\0" + sized + struct.pack("<I", 1) + layout).digest()
    namespace = digest[:12] + hashlib.sha256(b"kvtier tenant 1\0" + tenant).digest()[:4]
    assert cpp.say("identity") == f"{layout.hex()} {namespace.hex()}"
    status = python.client.status
    assert (status.layout_fingerprint, status.namespace_digest) == (layout.hex(), namespace.hex())


def test_an_index_page_is_read_as_the_page_says(host: DaemonHost) -> None:
    session = RawSession(host.socket).ready(features=["index-page"])
    try:
        hashes, _ = blocks("indexed", 40)
        store = cache_pb2.StoreRequest(
            signals=cache_pb2.Signals(ticket=1), hashes=b"".join(hashes[:20]), block_ids=range(20)
        )
        session.attached.call(store=store)
        session.attached.event("transfer")
        _, [descriptor] = session.side.call(open_index=side_pb2.OpenIndex(group=0))
        with open(descriptor, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as page:
            until(lambda: page[32] != 0, "the index page is complete")
            boot_nonce, seed, buckets, _, in_use = struct.unpack_from("<QQQQQ", page, 8)
            assert page[:8] == b"KVTINDX2"
            assert boot_nonce == host.status().boot_nonce
            assert len(page) == 4_096 + 64 * buckets
            secrets = secrets_of(seed)
            found = [indexed(page, in_use, secrets, each) for each in hashes]
        assert found == [True] * 20 + [False] * 20
    finally:
        session.close()


def secrets_of(seed: int) -> list[int]:
    secrets = []
    for _ in range(6):
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        secrets.append(z ^ z >> 31)
    return secrets


def fold(one: int, other: int) -> int:
    return one * other % 2**64 ^ one * other >> 64


def indexed(page: mmap.mmap, in_use: int, secrets: Sequence[int], value: bytes) -> bool:
    h = struct.unpack("<4Q", value.ljust(32, b"\0"))
    low, high = fold(h[0] ^ secrets[0], h[1] ^ secrets[1]), fold(h[2] ^ secrets[2], h[3] ^ secrets[3])
    mixed = fold(low ^ secrets[4], high ^ secrets[5])
    half = 1 << in_use.bit_length() - 1
    places = (bits % (2 * half) for bits in (mixed >> 8, mixed >> 36))
    buckets = [place if place < in_use else place - half for place in places]
    words = [word for bucket in buckets for word in struct.unpack_from("<8Q", page, 4_096 + 64 * bucket)]
    return any(word >> 8 == mixed >> 8 and word & 0xFF for word in words)


def test_another_tenant_finds_nothing(
    program: Path, host: DaemonHost, python: PythonClient, tmp_path: Path
) -> None:
    hashes, contents = blocks("private", 3)
    python.fill(0, contents)
    assert python.client.store(hashes, range(3)).wait(READY_S).done
    stranger = CppClient(program, host, tmp_path, "stranger", "another")
    try:
        stranger.ready()
        assert stranger.say("lookup", *hexes(hashes)) == "hits 0 states 0"
    finally:
        assert stranger.close() == 0


# --- what one client has to be able to do ---


def test_a_client_in_cpp_loads_back_what_it_has_stored_and_nothing_else_is_written(cpp: CppClient) -> None:
    cpp.ready()
    for count in (1, 30, 64):
        assert cpp.say("roundtrip", count) == f"equal {count * BLOCK_BYTES} bytes"


def test_lookups_tell_the_leading_run(cpp: CppClient) -> None:
    cpp.ready()
    hashes, contents = blocks("looked up", 6)
    cpp.fill(0, contents)
    stored = hashes[:3] + hashes[4:]
    assert cpp.say("store", 0, *hexes(stored)).startswith("DONE")
    assert cpp.say("lookup", *hexes(hashes)) == "hits 3 states 2220"
    assert cpp.say("lookup", *hexes(hashes[3:])) == "hits 0 states 0"
    assert cpp.say("lookup", *hexes(hashes[4:])) == "hits 2 states 22"


def test_refusals_change_nothing_and_tell_what_is_wrong(cpp: CppClient, host: DaemonHost) -> None:
    cpp.ready()
    hashes, contents = blocks("refused", 2)
    cpp.fill(0, contents)
    assert cpp.say("store", 0, *hexes(hashes)).startswith("DONE")
    assert cpp.say("twice", *hexes(hashes)).startswith("refused BLOCK_ID_DUPLICATE [block_ids=0]: ")
    assert cpp.say("store", 64, "ab" * 32).startswith("refused BLOCK_ID_RANGE [block_ids[0]=64]: ")
    until(lambda: host.status().leases == 0, "the lease of the refused load was given back")
    assert cpp.say("load", 7, *hexes(hashes)) == "DONE succeeded 11"
    assert cpp.contents(7, 2) == contents


def test_a_daemon_that_drains_refuses_and_is_used_again_afterwards(cpp: CppClient, host: DaemonHost) -> None:
    cpp.ready()
    hashes, contents = blocks("drained", 2)
    cpp.fill(0, contents)
    assert cpp.say("store", 0, *hexes(hashes)).startswith("DONE")
    run(sys.executable, "-m", "kvtierd.ctl", "drain", f"--socket={host.socket}")
    assert cpp.say("store", 0, "cd" * 32).startswith("refused DRAINING: ")
    assert cpp.say("lookup", *hexes(hashes)) == "hits 0 states 0"
    run(sys.executable, "-m", "kvtierd.ctl", "resume", f"--socket={host.socket}")
    assert cpp.say("load", 5, *hexes(hashes)) == "DONE succeeded 11"


def test_a_part_waits_for_its_doorbell_and_can_be_revoked_before(cpp: CppClient) -> None:
    cpp.ready()
    hashes, contents = blocks("gated", 2)
    cpp.fill(0, contents)
    assert cpp.say("gated-store", 0, hashes[0].hex()) == "DONE succeeded 1 results 0"
    assert cpp.say("revoked-store", 1, hashes[1].hex()).startswith(
        "CANCELLED succeeded 0 results 0 REVOKED: "
    )
    assert cpp.say("lookup", *hexes(hashes)) == "hits 1 states 20"


# --- the daemon goes and comes ---


@pytest.mark.parametrize("planned", [False, True], ids=["killed", "stopped"])
def test_a_client_survives_a_restart_of_the_daemon_and_finds_its_blocks(
    cpp: CppClient, host: DaemonHost, planned: bool
) -> None:
    before = cpp.ready()
    hashes, contents = blocks("kept", 9)
    cpp.fill(0, contents)
    assert cpp.say("store", 0, *hexes(hashes)).startswith("DONE")
    assert cpp.say("lease", *hexes(hashes)) == f"hits 9 states {'2' * 9}"
    if planned:
        host.stop()
    else:
        host.kill9()
    missed = cpp.say("lookup", *hexes(hashes))
    assert missed.startswith("hits 0 states - NOT_ATTACHED: "), missed
    assert cpp.say("store", 0, "ef" * 32).startswith("refused NOT_ATTACHED: ")
    host.start()
    assert cpp.ready() != before
    assert cpp.say("load-leased", 0).startswith(f"refused WRONG_EPOCH [epoch={before}]: ")
    assert cpp.say("wipe") == "wiped"
    assert cpp.say("load", 30, *hexes(hashes)) == f"DONE succeeded {'1' * 9}"
    assert cpp.contents(30, 9) == contents
    assert cpp.say("roundtrip", 20) == f"equal {20 * BLOCK_BYTES} bytes"


def test_a_client_registers_again_when_its_copy_worker_dies(cpp: CppClient, host: DaemonHost) -> None:
    before = cpp.ready()
    old = host.kill_worker()
    until(
        lambda: any(each.state == "live" and each.pid != old for each in host.status().workers),
        "there is another worker",
    )
    until(lambda: cpp.say("roundtrip", 8) == f"equal {8 * BLOCK_BYTES} bytes", "stores and loads work again")
    assert cpp.ready() == before


def test_kills_in_the_middle_of_copies_cost_misses_and_never_a_byte(cpp: CppClient, host: DaemonHost) -> None:
    cpp.ready()
    cpp.ask("churn", CHURN_S, 64)
    end_s = time.monotonic() + CHURN_S
    waits = np.random.default_rng(7)
    kills = 0
    while time.monotonic() + 3 < end_s:
        time.sleep(waits.uniform(0.3, 1.0))
        if kills % 3 == 2:
            until(lambda: any(each.state == "live" for each in host.status().workers), "a worker lives")
            host.kill_worker()
        else:
            host.restart()
        kills += 1
    said = re.fullmatch(r"whole (\d+) failed (\d+)", answer := cpp.answer("churn"))
    assert said, answer
    assert kills >= 3
    assert int(said[1]) > kills, "it loaded again after the kills"
    assert int(said[2]) >= 1, "no round trip met a kill"
    assert cpp.say("roundtrip", 64) == f"equal {64 * BLOCK_BYTES} bytes"


@pytest.fixture
def slow(
    cpp: CppClient, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[bytes], list[bytes]]:
    """Blocks that are stored, at a daemon whose copies take seconds."""
    cpp.ready()
    hashes, contents = blocks("slow", 9)
    cpp.fill(0, contents)
    assert cpp.say("store", 0, *hexes(hashes)).startswith("DONE")
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", f"slow-copy:{SLOW_S * 1_000}")
    host.restart()
    cpp.ready()
    assert cpp.say("wipe") == "wiped"
    return hashes, contents


def test_a_copy_that_its_daemon_has_left_running_is_waited_for(
    cpp: CppClient, host: DaemonHost, slow: tuple[list[bytes], list[bytes]]
) -> None:
    hashes, contents = slow
    began_s = time.monotonic()
    assert cpp.say("start-load", 20, *hexes(hashes)) == "started"
    host.kill9()
    assert cpp.say("revoke") == "not over"
    assert cpp.say("outcome") == f"DONE succeeded {'1' * 9}"  # the part word says so, and nobody else
    assert time.monotonic() - began_s > SLOW_S
    assert cpp.contents(20, 9) == contents


def test_the_death_of_a_copy_worker_ends_what_it_copied(
    cpp: CppClient, host: DaemonHost, slow: tuple[list[bytes], list[bytes]]
) -> None:
    [worker] = host.status().workers
    assert cpp.say("start-load", 20, *hexes(slow[0])) == "started"
    host.kill9()
    assert cpp.say("revoke") == "not over"
    os.kill(worker.pid, signal.SIGKILL)
    assert cpp.say("outcome").startswith(f"FAILED succeeded {'0' * 9} EPOCH_ENDED: ")
    host.start()
    cpp.ready()
    assert cpp.say("load", 20, *hexes(slow[0])) == f"DONE succeeded {'1' * 9}"
    assert cpp.contents(20, 9) == slow[1]


def test_a_store_is_withdrawn_while_it_runs(
    cpp: CppClient, host: DaemonHost, slow: tuple[list[bytes], list[bytes]]
) -> None:
    assert cpp.say("start-store", 0, "12" * 32) == "started"
    assert cpp.say("revoke") == "over"
    assert cpp.say("outcome").startswith("CANCELLED succeeded 0 results 0 REVOKED: ")
    assert cpp.say("lookup", "12" * 32) == "hits 0 states 0"


# --- what the page says in tables is what the code says ---


def test_the_page_names_every_reason_with_its_number() -> None:
    named = {int(number): name for number, name in re.findall(r"\b(\d+) `([A-Z_]+)`", PAGE)}
    known = {number: name.removeprefix("REASON_") for name, number in types_pb2.Reason.items() if number}
    assert named == known


def test_the_page_names_every_feature_and_every_request() -> None:
    section = PAGE.split("## 15.")[1].split("## 16.")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == FEATURES
    words = PAGE.lower()
    bodies = cache_pb2.AttachRequest.DESCRIPTOR.oneofs_by_name["body"].fields
    assert [field.name for field in bodies if field.name not in words] == []


def test_the_page_tells_the_defaults() -> None:
    core, server = CoreLimits(), ServerConfig()
    section = PAGE.split("## 14.")[1].split("## 15.")[0]
    told = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([\d,]+) \|", section, re.MULTILINE))
    assert {name: int(value.replace(",", "")) for name, value in told.items()} == {
        "lookup_hashes_max": core.lookup_hashes_max,
        "transfer_blocks_max": core.transfer_blocks_max,
        "transfers_max": core.transfers_max,
        "lease_ttl_ms": core.lease_ttl_s * 1_000,
        "heartbeat_interval_ms": server.heartbeat_interval_s * 1_000,
        "gate_deadline_ms": core.gate_deadline_s * 1_000,
        "message_bytes_max": server.message_bytes_max,
    }
    for said in (
        f"{core.leases_max:,} leases of an instance",
        f"{server.sessions_max} sessions",
        f"{server.hello_deadline_s:g} s to Hello",
        f"{server.session_silence_s:g} s of silence",
        f"{core.transfer_deadline_s:g} s for a transfer",
        f"{core.lease_lifetime_s:g} s after it was granted",
    ):
        assert said in " ".join(PAGE.split()), said
