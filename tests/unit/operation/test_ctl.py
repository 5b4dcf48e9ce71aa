"""`kvtierctl status`, for people and for programs."""

import asyncio
import json
import socket
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from kvtier.v1 import admin_pb2
from kvtierd.ctl import clear as ctl_clear
from kvtierd.ctl import commands as ctl
from kvtierd.ctl import messages, remote
from kvtierd.ctl import text as ctl_text
from kvtierd.ctl.explanation import block_sizes, explained, relevance
from kvtierd.ctl.lists import engines, namespaces
from kvtierd.ctl.status import page
from kvtierd.ctl.terminal import plain
from kvtierd.rpc.authority import Viewer
from kvtierd.rpc.status import AboutDaemon, status_response

from tests.unit.operation.snapshots import GPU, busy_snapshot


@pytest.fixture
def status() -> admin_pb2.StatusResponse:
    about = AboutDaemon("1.2", 4242, "/run/k.sock", "http://127.0.0.1:9470/metrics")
    return asyncio.run(status_response(about, busy_snapshot(), Viewer("a test", None)))


def test_the_answer_holds_everything_the_contract_names(status: admin_pb2.StatusResponse) -> None:
    empty = [field.name for field in status.DESCRIPTOR.fields if not getattr(status, field.name)]
    assert empty == []
    counters = [
        field.name for field in status.counters.DESCRIPTOR.fields if not getattr(status.counters, field.name)
    ]
    assert counters == []
    assert status.instances[0].sessions[0].attached_s == 60
    assert len(status.instances[0].sessions) == 1, "a session that has just gone is left out"


def test_people_see_the_whole_picture(status: admin_pb2.StatusResponse) -> None:
    text = plain(page(status))
    for part in (
        "kvtierd 1.2  serving  pid 4242  up 1 h 2 min",
        "20 MiB (16 MiB for blocks and their slot tables, 2 MiB for the file's header, 2 MiB too little for",
        "8 MiB of 16 MiB",
        "██████████░░░░░░░░░░  50%",
        "60 ready, 5 writing",
        "warm: 41 blocks, 42 KiB found in 0.50 s, 44 slots discarded",
        "21 of 400 blocks, 100 hit (25.0%)",
        "half 12.5%, now 25.0%, twice 37.5% by a sample; hit 26.2%",
        "51 blocks failed their check and were not served: 11 before a load, 12 after a restart, 13 by s",
        "if bytes of a block change by themselves, this is noticed after 2 min 5 s on average (16 MiB/s are "
        "read at most, less while blocks are copied). Until then, a load may get the changed bytes.",
        "70 slots, 71 MiB compared so far",
        "2 slots set aside",
        "engine-0  quarantined  tiny",
        "engine-0 is quarantined: 1 of 9 audits found blocks",
        "engine-0  scheduler and rank 0  4321  root     1 min 0 s  test 1",
    ):
        assert part in text


def test_people_see_what_each_disk_does_and_what_is_wrong_with_it(status: admin_pb2.StatusResponse) -> None:
    text = plain(page(status))
    for part in (
        "Disk         /mnt/a  live\n",
        "█████░░░░░░░░░░░░░░░  25%  16 MiB of 64 MiB, 83 blocks",
        "  start      warm: 81 blocks, 82 KiB found",
        "  written    90 blocks, 91 KiB, 84 KiB on their way, 953.7 MiB/s lately",
        "  read       92 blocks, 93 KiB, 85 KiB on their way, 1.863 GiB/s lately",
        "  worker     pid 999, 96 errors",
        "  scrub      /mnt/a: 22 of 88 blocks compared, 25%",
        "Disk         /mnt/b  failing: EIO\n",
        "  start      cold: no slab yet",
        "  worker     none, 96 errors",
        "  CORRUPT    3 blocks did not match and were not served, 2 slots set aside",
        "29 blocks, 14 of them not written to a disk",
        "  promoted   38 blocks, 39 KiB; 40 reported as misses because computing them is faster",
        "Store        s3://kv/blocks  live\n",
        "  known here ",
        "  written    90 blocks, 91 KiB, compressed to 65 KiB (1.40 : 1), 84 KiB on their way, 953.7 MiB/s",
        "  read       92 blocks, 93 KiB, compressed to 62 KiB (1.50 : 1), 85 KiB on their way",
        "  forgotten  94 blocks",
    ):
        assert part in text
    assert text.count("CORRUPT") == 3, "of the first disk there is nothing to say"
    assert text.count("  encryption ") == 2, "a store encrypts by itself"
    assert text.count("  start ") == 3, "of the pool and of the disks: a store is looked through instead"
    assert "disk-0" not in text, "its worker is named with the disk"
    without = admin_pb2.StatusResponse()
    without.MergeFrom(status)
    del without.disks[:]
    text = plain(page(without))
    assert "promoted" not in text
    assert "Disk" not in text


def test_people_see_what_routers_are_told(status: admin_pb2.StatusResponse) -> None:
    text = plain(page(status))
    for part in (
        "Events       ipc:///run/events\n",
        "  published  1,003 batches in 2 topics: 4,005 blocks stored, 3,006 removed",
        "7 times all of them anew, because news came too fast",
        "  replays    11, 5 of them with all blocks of a topic; 903 batches kept, 91 KiB",
        "3 without an end (subscribers that had gone or were too slow), 12 refused",
    ):
        assert part in text
    assert "STOPPED" not in text
    changed = admin_pb2.StatusResponse()
    changed.MergeFrom(status)
    changed.events.alive = False
    changed.events.replay_endpoint = ""
    text = plain(page(changed))
    assert "  STOPPED    nothing is published any more; the daemon's log says why" in text
    assert "  replays    off" in text
    changed.ClearField("events")
    assert "Events" not in plain(page(changed))


def test_every_field_of_a_disk_arrives(status: admin_pb2.StatusResponse) -> None:
    fields = [field.name for field in admin_pb2.DiskStatus.DESCRIPTOR.fields]
    assert [name for name in fields if not any(getattr(disk, name) for disk in status.disks)] == []


class TestScrub:
    """What is said about a scrub; that it is waited for, tests/integration/daemon/test_disks.py."""

    def disk(self, **fields: object) -> admin_pb2.DiskStatus:
        return admin_pb2.DiskStatus(path="/mnt/a", **{"state": "live", **fields})  # type: ignore[arg-type]

    def said(self, corrupt: int = 0, **fields: object) -> str:
        return "\n".join(ctl_text.scrubbed([self.disk(**fields)], {"/mnt/a": corrupt}))

    def test_people_are_told_what_was_found(self) -> None:
        assert self.said(scrub_blocks=1000, scrubbed_blocks=1000) == (
            "/mnt/a: 1,000 of 1,000 blocks compared, 100%, none corrupt"
        )
        assert self.said(2, scrub_blocks=1, scrubbed_blocks=1).endswith(
            "1 of 1 block compared, 100%, 2 blocks CORRUPT"
        )

    def test_an_empty_disk_is_done_at_once(self) -> None:
        assert self.said() == "/mnt/a: 0 of 0 blocks compared, 100%, none corrupt"

    def test_people_are_told_what_was_not_looked_at(self) -> None:
        assert self.said(scrub_blocks=4, scrubbed_blocks=1).endswith("25%, none corrupt; it goes on")
        assert self.said(state="off", why="no room") == "/mnt/a: not looked at, off: no room"

    def test_no_daemon_is_said_in_one_line(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(ctl.main, ["scrub", "--socket", str(tmp_path / "k.sock")])
        assert (result.exit_code, result.output.count("\n")) == (69, 1)


def test_people_see_devices_in_columns(status: admin_pb2.StatusResponse) -> None:
    *_, head, cpu, gpu = plain(page(status)).splitlines()
    assert head.split() == ["WORKER", "STATE", "PID", "PARTS", "MAPPED", "REGISTERED", "REPLACED"]
    assert cpu.split() == ["cpu", "live", "777", "6", "3", "MiB", "-", "2"]
    assert gpu.split() == [GPU, "live", "888", "7", "5", "MiB", "9", "MiB", "3"]
    assert [cpu.index("live"), cpu.index("777")] == [gpu.index("live"), gpu.index("888")]
    assert plain(page(admin_pb2.StatusResponse())).splitlines()[-2:] == ["Copy workers", "  none"]


def test_nothing_is_lost_on_a_narrow_terminal(status: admin_pb2.StatusResponse) -> None:
    status.instances[0].instance = "an-engine-whose-name-is-longer-than-a-third-of-the-line"
    for whole in (page(status), engines(status)):
        narrow = plain(whole, 80)
        assert max(map(len, narrow.splitlines())) <= 80
        digest = next(word for word in narrow.split() if word.startswith("cdcd"))
        assert digest.endswith("…")
        assert "cd" * 16 in plain(whole)
        assert letters(narrow.replace(digest, "cd" * 16)) == letters(plain(whole))


def letters(text: str) -> list[str]:
    return sorted(text.replace("\n", "").replace(" ", ""))


def test_programs_get_numbers_and_every_field(status: admin_pb2.StatusResponse) -> None:
    found = json.loads(messages.to_json(status))
    assert found["boot_nonce"] == str(2**64 - 1)
    assert found["instances"][0]["epoch"] == str(status.instances[0].epoch)
    assert found["counters"]["lookup_hits"] == 100
    assert found["instances"][0]["namespace_digest"] == "cd" * 16
    assert found["instances"][0]["sessions"][0]["pid"] == 4321
    assert [worker["device"] for worker in found["workers"]] == ["cpu", GPU, "disk-0"]
    assert [disk["state"] for disk in found["disks"]] == ["live", "failing", "live"]
    assert (found["workers"][1]["mapped_bytes"], found["workers"][1]["registered_bytes"]) == (
        5 << 20,
        9 << 20,
    )
    empty = json.loads(messages.to_json(admin_pb2.StatusResponse()))
    assert empty["pool"]["capacity_bytes"] == 0
    assert empty["instances"] == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3725, "1 h 2 min"), (90_000, "1 d 1 h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert ctl_text.duration(seconds) == text


def test_no_daemon_is_said_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(ctl.main, ["status", "--socket", str(tmp_path / "k.sock")])
    assert result.exit_code == 69
    assert result.output.startswith("kvtierctl: no daemon: ")
    assert "kvtierd serve" in result.output
    assert result.output.count("\n") == 1


def test_a_socket_nobody_answers_at_is_told_apart(socket_dir: Path) -> None:
    path = socket_dir / "k.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    result = CliRunner().invoke(ctl.main, ["status", "--socket", str(path)])
    assert result.exit_code == 69
    assert "no daemon answers" in result.output


def test_a_folder_is_told_which_file_in_it_to_name(socket_dir: Path) -> None:
    for name in ("kvtierd.sock", "k.sock"):
        result = CliRunner().invoke(ctl.main, ["status", "--socket", str(socket_dir)])
        assert result.exit_code == 69
        assert f"is a folder, not a socket: name the socket in it, {socket_dir}/{name}\n" in result.output
        (socket_dir / "k.side.sock").touch()
        (socket_dir / "k.sock").touch()


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.CANCELLED])
def test_no_failure_is_told_in_grpc_s_own_words(code: grpc.StatusCode, tmp_path: Path) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why", "a long dump")
    said = ctl.explain(tmp_path / "k.sock", error)
    assert said == f"the daemon at {tmp_path}/k.sock did not do it: {code.name}, why"


class TestExplain:
    def test_people_read_the_reason_and_the_differences(self) -> None:
        response = admin_pb2.ExplainResponse(
            explanations=[
                admin_pb2.Explanation(
                    namespace_digest="aa" * 16,
                    model="tiny",
                    verdict=admin_pb2.VERDICT_ELSEWHERE,
                    text="not stored in this namespace in the last 9 s, but in another",
                    elsewhere=[
                        admin_pb2.Elsewhere(
                            namespace_digest="bb" * 16,
                            differences=[
                                admin_pb2.Difference(field="namespace.kv_dtype", here="bf16", there="fp16"),
                                admin_pb2.Difference(field="namespace.tenant", there="t"),
                                admin_pb2.Difference(field="namespace.salt"),
                            ],
                        ),
                        admin_pb2.Elsewhere(namespace_digest="cc" * 16, group=1),
                    ],
                )
            ]
        )
        text = plain(explained([response]))
        for part in (
            f"namespace {'aa' * 16}  tiny  group 0",
            "not stored in this namespace",
            f"in {'bb' * 16}, group 0, which differs in",
            "namespace.kv_dtype: bf16 here, fp16 there",
            "namespace.tenant: none here, t there",
            "namespace.salt: (not shown)",
            f"in {'cc' * 16}, group 1: what it was made of is not known any more",
        ):
            assert part in text

    def test_what_is_known_comes_first_and_unused_namespaces_are_only_counted(self) -> None:
        named = [("aa", "NEVER_STORED"), ("bb", "ELSEWHERE"), ("cc", "NEVER_STORED"), ("dd", "EVICTED")]
        response = admin_pb2.ExplainResponse(
            explanations=[
                admin_pb2.Explanation(
                    namespace_digest=digest, verdict=admin_pb2.Verdict.Value(f"VERDICT_{verdict}")
                )
                for digest, verdict in named
            ]
        )
        response.explanations.sort(key=lambda each: relevance(each, {"bb"}))
        assert [each.namespace_digest for each in response.explanations] == ["dd", "bb", "aa", "cc"]
        lines = plain(explained([response], {"bb"})).splitlines()
        assert [line[:12] for line in lines if line.startswith("namespace")] == [
            "namespace dd",
            "namespace bb",
        ]
        assert lines[-1].startswith("not known in 2 groups of namespaces that no attached engine uses")
        assert plain(explained([response])).count("namespace ") == 4

    def test_what_did_not_fit_into_the_answer_is_counted(self) -> None:
        shown = admin_pb2.Explanation(namespace_digest="aa", verdict=admin_pb2.VERDICT_READABLE, text="yes")
        response = admin_pb2.ExplainResponse(explanations=[shown], left_out=7)
        assert plain(explained([response])).splitlines()[-1].startswith("7 more groups did not fit into")

    def test_a_prompt_is_summed_up_and_neighbours_of_one_fate_are_one_entry(self) -> None:
        def block(fate: str, text: str) -> admin_pb2.ExplainResponse:
            verdict = admin_pb2.Verdict.Value(f"VERDICT_{fate}")
            found = admin_pb2.Explanation(namespace_digest="aa", model="m", verdict=verdict, text=text)
            never = admin_pb2.Explanation(namespace_digest="bb", verdict=admin_pb2.VERDICT_NEVER_STORED)
            return admin_pb2.ExplainResponse(explanations=[never, found], known_namespaces=2)

        prompt = [block("READABLE", "readable now")] * 20 + [
            block("EVICTED", "evicted 9 s ago"),
            block("EVICTED", "evicted 8 s ago"),
            block("ON_DISK", "on a disk or in the store only"),
        ]
        assert plain(explained(prompt, set())).splitlines() == [
            "namespace aa  m  group 0: 21 of 23 blocks can be loaded",
            "  blocks 1 to 20: readable now",
            "  blocks 21 to 22: evicted 9 s ago",
            "  block 23: on a disk or in the store only",
            "not known in 1 group of namespaces that no attached engine uses; --namespace DIGEST tells about "
            "one of them (`kvtierctl namespaces`)",
        ]

    def test_what_is_known_nowhere_was_never_stored(self) -> None:
        never = admin_pb2.Explanation(verdict=admin_pb2.VERDICT_NEVER_STORED)
        response = admin_pb2.ExplainResponse(explanations=[never], uptime_s=65, known_namespaces=1)
        said = plain(explained([response], set()))
        first, second = said.splitlines()
        assert first == "never stored, as far as this daemon remembers: not in the last 1 min 5 s"
        assert second.startswith("not known in 1 group of namespaces that no attached engine uses")

    def test_a_prompt_that_is_not_known_at_all_is_told_the_block_sizes_there_are(self) -> None:
        there = [admin_pb2.NamespaceStatus(block_tokens=tokens) for tokens in (32, 16, 32, 0)]
        assert "Blocks here have 16 or 32 tokens" in block_sizes(there)
        assert block_sizes(there[-1:]) == ""

    def test_programs_can_tell_no_age_from_none_at_all(self) -> None:
        response = admin_pb2.ExplainResponse(explanations=[admin_pb2.Explanation(text="x")] * 2)
        response.explanations[1].age_s = 0
        found = json.loads(messages.to_json(response))["explanations"]
        assert [each["age_s"] for each in found] == [None, 0]

    @pytest.mark.parametrize("wrong", ["xyz", "abc", "0x" + "ab" * 32, "ab" * 33, " ", "", "g" * 5_000])
    @pytest.mark.parametrize("as_json", [["--json"], []])
    def test_what_is_no_hash_is_named_with_what_to_write(
        self, wrong: str, as_json: list[str], tmp_path: Path
    ) -> None:
        line = ["explain", "--socket", str(tmp_path / "k.sock"), *as_json, "--", wrong]
        result = CliRunner().invoke(ctl.main, line)
        assert result.exit_code == 2
        assert repr(wrong)[:70] in result.stderr
        assert "hexadecimal" in result.stderr
        assert "64 digits" in result.stderr
        assert (result.stdout, len(result.stderr) < 500) == ("", True)

    def test_one_of_many_hashes_is_no_hash(self, tmp_path: Path) -> None:
        line = ["explain", "--socket", str(tmp_path / "k.sock"), "-"]
        result = CliRunner().invoke(ctl.main, line, input=f"{'ab' * 32}\nnot this\n")
        assert (result.exit_code, "'not'" in result.stderr) == (2, True)


class TestNamespaces:
    def test_groups_of_a_namespace_are_one_table_and_what_did_not_fit_is_counted(self) -> None:
        named = [("aa", 0), ("bb", 0), ("aa", 1)]
        there = [admin_pb2.NamespaceStatus(namespace_digest=digest, group=group) for digest, group in named]
        found = admin_pb2.ListNamespacesResponse(namespaces=there)
        whole = plain(namespaces(found, "", False))
        assert (whole.count("namespace aa"), whole.count("namespace bb")) == (1, 1)
        assert "did not fit" not in whole
        found.left_out = 1
        assert "1 older group did not fit into the daemon's answer" in plain(namespaces(found, "", False))

    def test_none_that_begins_so_is_told_apart_from_none_at_all(self) -> None:
        nothing = admin_pb2.ListNamespacesResponse()
        assert "begins with 'aa'" in plain(namespaces(nothing, "aa", False))
        assert plain(namespaces(nothing, "", False)).startswith("no engine has attached yet")


class TestClear:
    def test_people_are_told_what_goes_before_and_what_stays_afterwards(self) -> None:
        found = admin_pb2.ListNamespacesResponse(
            namespaces=[
                admin_pb2.NamespaceStatus(namespace_digest="aa11", host_blocks=1_000, disk_blocks=3),
                admin_pb2.NamespaceStatus(namespace_digest="aa11", group=1, host_blocks=500),
                admin_pb2.NamespaceStatus(namespace_digest="bb22", host_blocks=7, disk_blocks=1),
            ]
        )
        of_one = admin_pb2.ListNamespacesResponse(namespaces=found.namespaces[:2])
        one, every = ctl_clear.question(of_one, "aa"), ctl_clear.question(found, "")
        assert one == "Drop 1,500 blocks in memory and 3 blocks on disks, of namespace aa11?"
        assert every == "Drop 1,507 blocks in memory and 4 blocks on disks, of all namespaces (2)?"
        found.left_out = 3
        assert "and 3 more groups, whose blocks are not counted here?" in ctl_clear.question(found, "")
        answer = admin_pb2.ClearResponse(
            cleared_blocks=1_490,
            host_bytes=1 << 20,
            held_blocks=1,
            under_way_blocks=9,
            unsettled_paths=["/mnt/a"],
        )
        assert list(ctl_clear.cleared(answer)) == [
            "1,490 blocks dropped: 1 MiB of memory, 0 B on disks",
            "  stay   1 block leased or being loaded",
            "  stay   9 blocks being stored, promoted or written to a disk",
            "  disk   /mnt/a does not keep it yet: blocks may come back from there after a restart",
        ]

    def test_an_empty_namespace_does_not_mean_all(self, tmp_path: Path) -> None:
        found = CliRunner().invoke(ctl.main, ["clear", "--namespace=", f"--socket={tmp_path / 'none'}"])
        assert found.exit_code == 2
        assert "leave the option out" in found.output


def test_every_command_that_answers_has_json_for_programs() -> None:
    without = {
        name
        for name, command in ctl.main.commands.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == {"completion", "remote"}
    assert all(
        any("--json" in parameter.opts for parameter in command.params)
        for command in remote.remote.commands.values()
    )
