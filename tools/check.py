"""Runs checks stage by stage, shows their output, and ends with what was proved.

    python -m tools.check check   the static checks, the unit tests and a short simulation: in two minutes
    python -m tools.check test    what must hold before a change is merged: each kind of proof at least once
    python -m tools.check full    everything of `test`, and the long form of what has one
    python -m tools.check NAME    single stages, see FORMS

Every stage runs even if an earlier one failed, within a deadline. Its whole output is kept under build/logs/.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

from tools import fault_counts, vllm_versions
from tools.stages import BIN, Beside, Stage, pytest_stage, run_all, to_the_end

WITHOUT_ENGINE = "not vllm and not sglang and not gpu and not fake_gpu and not deploy"
CAMPAIGNS, ENGINES, DEPLOYED = "tests/faults", "tests/vllm", "tests/deploy"
"""The folders of the fault suite, which has counts to reach, of all tests that load vLLM, and of those that
must run as root. A stage names the folders of its tests, because each of its workers reads all of them."""
PARALLEL_FILE, WORKLOAD_FILE, AUTOSTART_FILE, AUDITS_FILE, TWO_HOSTS_FILE = (
    f"{ENGINES}/test_{name}.py" for name in ("parallel", "workload", "api_server", "audits", "two_hosts")
)
SGLANG_FOLDER, SGLANG_RESTORE = "tests/sglang", "tests/sglang/test_restore.py"
FAKE_GPU_FOLDERS = ("tests/integration", "tests/gpu")
FAKE_GPU_UNITS = ("tests/unit/client", "tests/unit/transfer")


@dataclass(frozen=True)
class Form:
    """How much of its tests a stage runs."""

    marks: str = ""
    """The marks that further narrow the tests."""
    length: str = "short"
    """The length of campaigns and simulations (tests/support/length.py)."""


MERGE = Form(marks=" and not long")
"""The form of `make test`, without repeats and further combinations, which are marked `long`."""
EACH = Form()
"""The form of targets of single stages."""
FULL = Form(length="full")
"""The form of `make test-full`."""
# Daemons and their clients mostly wait, those with a hanging driver even more. Engines compute, but while
# they start, end and wait for a daemon they leave cores free: 4 processes need 256 s where 3 needed 327.
WORKERS, FAKE_GPU_WORKERS, ENGINE_WORKERS = 6, 8, 4
SHARING_CORES = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Variables for engines side by side: the OpenMP threads of one would wait for those of the other."""

RUFF = Stage("ruff", [str(BIN / "ruff"), "check", "."], "The code follows the style rules (ruff).")
MYPY = Stage("mypy", [str(BIN / "mypy")], "Every type fits (mypy --strict over all packages).")
CLASS_NAMES = Stage(
    "class-names", [sys.executable, "tools/class_names.py"], "No two classes of the product share a name."
)
IMPORTS = Stage(
    "imports",
    ["env", "PYTHONPATH=tools", str(BIN / "lint-imports"), "--no-logo"],  # our contract type is in tools/
    "Packages import only what the architecture allows, and no modules import each other in a circle.",
)
QUICK_LINT = (RUFF, CLASS_NAMES, IMPORTS)
UNIT = pytest_stage(
    "tests-unit",
    WITHOUT_ENGINE + MERGE.marks,
    "The unit tests pass, and a short simulation finds no broken promise.",
    deadline_s=600,
    folders=("tests/unit", "tests/simulation"),
    workers=WORKERS,
)
GENERATED = Stage(
    "generated",
    [sys.executable, "tools/generate.py", "--check"],
    "The committed generated code is what the protos and the native module generate now.",
)
LIGHT_CLIENT = Stage(
    "light-client",
    [sys.executable, "tools/light_client.py"],
    "The wheel builds, and the light client works with the oldest libraries that it names.",
    deadline_s=600,
)


def main_stage(form: Form, *without: str) -> Stage:
    """Returns the stage of all tests that need no engine, except the fault suite and the
    folders `without`."""
    return pytest_stage(
        "tests",
        WITHOUT_ENGINE + form.marks,
        "The unit, contract, simulation and integration tests pass, those of single faults among them.",
        deadline_s=3_000,
        without=(CAMPAIGNS, DEPLOYED, *without),
        workers=WORKERS,
        environment={"KVTIER_LENGTH": form.length},
    )


def campaigns(form: Form) -> Stage:
    """Returns the stage of the fault suite without engines."""
    return pytest_stage(
        "tests-faults",
        WITHOUT_ENGINE + form.marks,
        "Killing, stopping and corrupting real processes and files ends as the failure table says.",
        deadline_s=3_600 if form is FULL else 900,
        folders=(CAMPAIGNS,),
        workers=WORKERS,
        least=fault_counts.IN_TEST_FULL if form is FULL else fault_counts.IN_MAKE_TEST,
        environment={"KVTIER_LENGTH": form.length},
    )


def engines(form: Form, *without: str, only: str = "not gpu") -> Stage:
    """Returns the stage of real engines and schedulers, those on the fake GPU included, and of tests of the
    connector without them; not of the files `without`, and of no tests but those with the marks `only`."""
    return pytest_stage(
        "tests-vllm",
        only + form.marks,
        "A real vLLM stores, loses and restores its KV cache through kvtierd, in host memory or on a GPU "
        "(driver: a double of our own).",
        deadline_s=2_400,
        folders=(ENGINES,),
        without=(PARALLEL_FILE, *without),
        workers=ENGINE_WORKERS,
        environment=SHARING_CORES | {"KVTIER_LENGTH": form.length},
    )


def parallel_engines(form: Form) -> Stage:
    """Returns the stage of engines with several ranks. These wait for each other by spinning, so they get all
    cores."""
    return pytest_stage(
        "tests-vllm-parallel",
        "vllm" + form.marks,
        "Every rank of a parallel engine restores what is its own.",
        deadline_s=1_200,
        folders=(PARALLEL_FILE,),
    )


def sglang_engines(form: Form) -> Stage:
    """Returns the stage of real SGLang engines, whose ranks wait for each other by spinning."""
    return pytest_stage(
        "tests-sglang",
        "sglang" + form.marks,
        "A real SGLang restores bit for bit what another one has computed."
        if form is MERGE
        else "A real SGLang restores what another one has computed bit for bit, and whatever happens to the "
        "daemon costs no request.",
        deadline_s=600 if form is MERGE else 1_800,
        folders=(SGLANG_RESTORE if form is MERGE else SGLANG_FOLDER,),
        environment={"KVTIER_WORKLOAD": "short" if form is MERGE else "long"},
    )


def fake_gpu(form: Form) -> Stage:
    """Returns the stage with a GPU behind a double of the CUDA driver, without engines."""
    kills = {} if form is MERGE else {"KVTIER_GPU_KILLS": str(fault_counts.GPU_KILLS_PER_CASE)}
    return pytest_stage(
        "tests-fake-gpu",
        "fake_gpu and not vllm and not gpu" + form.marks,
        "Copies from and to a GPU keep the contract of those of the CPU, and what hangs, fails or is "
        "killed costs one GPU's worker (driver: a double of our own).",
        deadline_s=1_200 if form is MERGE else 2_400,
        folders=(*FAKE_GPU_FOLDERS, *FAKE_GPU_UNITS, f"{CAMPAIGNS}/gpu"),
        workers=FAKE_GPU_WORKERS,
        least={} if form is MERGE else fault_counts.FAKE_GPU,
        environment={"KVTIER_LENGTH": form.length} | kills,
    )


def merge_steps(form: Form, *without: str) -> list[Stage | Beside]:
    """Returns what `make test` runs, in a form, without the files `without` of tests of engines. Stages that
    keep one core busy run beside each other."""
    return [
        Beside(((*QUICK_LINT, GENERATED, LIGHT_CLIENT), (MYPY,))),
        main_stage(form, ENGINES, SGLANG_FOLDER),
        campaigns(form),
        engines(form, *without),
        parallel_engines(form),
        sglang_engines(form),
        fake_gpu(form),
    ]


DEPLOY = pytest_stage(
    "tests-deploy",
    "deploy",
    "An operator's way: packages, units, manifests, metrics and commands of the documentation work.",
    deadline_s=3_600,
    folders=("tests/deploy",),  # tests elsewhere need what this machine may lack: an engine, for example
)
_WORKLOAD = pytest_stage(
    "tests-workload",
    "vllm",
    "Random requests to engines that share a daemon in trouble are answered as without a cache.",
    deadline_s=3 * 3_600,
    folders=(WORKLOAD_FILE,),
    environment=SHARING_CORES | {"KVTIER_WORKLOAD": "long"},
)
WORKLOAD = replace(_WORKLOAD, command=[*_WORKLOAD.command, "--capture=no"])  # it reports its progress
AUTOSTART = pytest_stage(
    "tests-autostart",
    "vllm",
    "A daemon that an engine has started outlives it, whichever of its processes ends, and however.",
    deadline_s=1_800,
    folders=(AUTOSTART_FILE,),
    environment=SHARING_CORES | {"KVTIER_AUTOSTART_WAYS": "all"},
)
AUDITS = pytest_stage(
    "tests-audits",
    "vllm",
    "Thousands of audits of sound engines raise no alarm; blocks of other models do, with the first hit.",
    deadline_s=3_600,
    folders=(AUDITS_FILE,),
    environment=SHARING_CORES | {"KVTIER_AUDITS_LONG": "1"},
)

REMOTE = pytest_stage(
    "tests-remote",
    "not fake_gpu and not gpu",
    "What an engine of one host stores, an engine of another restores bit for bit through a folder, a "
    "real S3 server or Mooncake Store, and whatever happens to the store is a miss in time.",
    deadline_s=1_800,
    folders=("tests/integration/stores", TWO_HOSTS_FILE),
    workers=2,
    environment=SHARING_CORES,
)

SECURITY = pytest_stage(
    "tests-security",
    "not fake_gpu and not vllm and not gpu",
    "Users of one host cannot read, poison, evict, stop or keep out what is another's, and hostile input "
    "ends in a refusal.",
    deadline_s=3_600,
    folders=(
        "tests/security",
        f"{CAMPAIGNS}/bad_requests",
        f"{CAMPAIGNS}/test_scarcity.py",
        f"{CAMPAIGNS}/test_names_of_the_past.py",
        *(
            f"tests/integration/daemon/test_{name}.py"
            for name in ("hostile", "holes", "permission", "privacy")
        ),
        "tests/unit/client/test_trust.py",
        "tests/unit/core/test_tenants.py",
        "tests/unit/kernels/test_hardening.py",
    ),
    workers=WORKERS,
    environment={"KVTIER_LENGTH": "full"},
)


_FUZZED_S = int(os.environ.get("KVTIER_FUZZ_SECONDS", "120"))
FUZZ = pytest_stage(
    "tests-fuzz",
    "not gpu",
    "Coverage-guided fuzzing of what clients and files may say breaks nothing (KVTIER_FUZZ_SECONDS for each "
    f"target: {_FUZZED_S}).",
    deadline_s=1_200 + 10 * _FUZZED_S,
    folders=("tests/fuzz",),
    environment={"KVTIER_FUZZ_SECONDS": str(_FUZZED_S)},
)


def full_steps() -> list[Stage | Beside]:
    """Returns everything that needs no GPU, no other host and no root."""
    # The long forms of these files run as stages of their own.
    steps = merge_steps(FULL, WORKLOAD_FILE, AUTOSTART_FILE, AUDITS_FILE)
    versions = [stage for version in vllm_versions.VERSIONS for stage in vllm_versions.stages(version)]
    # Each of these keeps a little more than one core busy, for twenty minutes.
    return [*steps, Beside(((WORKLOAD, AUTOSTART), (AUDITS,))), *versions]


FORMS: dict[str, list[Stage | Beside]] = {
    "check": [Beside(((*QUICK_LINT, UNIT), (MYPY,)))],
    "test": merge_steps(MERGE),
    "full": full_steps(),
    "light": [LIGHT_CLIENT, main_stage(MERGE), campaigns(MERGE)],  # no engine, no tools of one Python only
    "lint": [*QUICK_LINT, MYPY],
    "deploy": [DEPLOY],
    "vllm": [engines(EACH), parallel_engines(EACH)],
    "autostart": [AUTOSTART],
    "audits": [AUDITS],
    "remote": [REMOTE],
    "sglang": [sglang_engines(EACH)],
    "security": [SECURITY, FUZZ],
    "workload": [WORKLOAD],
    "fake-gpu": [fake_gpu(EACH), engines(EACH, only="vllm and fake_gpu and not gpu")],
}


def main() -> int:
    """Runs the stages that the argument names. Returns 0 only if every one of them passed."""
    which = sys.argv[1] if len(sys.argv) == 2 else ""
    if which not in FORMS:
        print(f"usage: check.py {'|'.join(FORMS)}", file=sys.stderr)
        return 2
    return run_all(FORMS[which])


if __name__ == "__main__":
    sys.exit(to_the_end(main))
