"""The connector under the scheduler of every vLLM that it supports: python -m tools.vllm_versions [VERSION]

Each version has an environment of its own under build/vllm (about 2.3 GB, shared with uv's cache where the
file system can), which a second run finds again. What computes nothing is run: the scheduler, its block pool
and the connector around a model that only checks (tests/vllm/mini_engine.py), against real daemons.
"""

from __future__ import annotations

import argparse
import sys

from tools.stages import COLOR, LOGS, REPO, Stage, run_all, to_the_end

VERSIONS = ("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
TESTS = (
    "tests/vllm/test_adapters.py",
    "tests/vllm/test_config.py",
    "tests/vllm/test_context_parallel.py",
    "tests/vllm/test_control.py",
    "tests/vllm/test_events.py",
    "tests/vllm/test_generations.py",
    "tests/vllm/test_hybrid.py",
    "tests/vllm/test_identity.py",
    "tests/vllm/test_keys.py",
    "tests/vllm/test_kv_memory_and_layout.py",
    "tests/vllm/test_late_link.py",
    "tests/vllm/test_latents.py",
    "tests/vllm/test_multi_connector.py",
    "tests/vllm/test_namespace.py",
    "tests/vllm/test_preemption.py",
    "tests/vllm/test_retaining.py",
    "tests/vllm/test_room.py",
    "tests/vllm/test_simulation.py",
    "tests/vllm/test_stats.py",
    "tests/vllm/test_weights_in_disorder.py",
)
SETUP_DEADLINE_S, TESTS_DEADLINE_S = 1_800, 1_200


def stages(version: str) -> list[Stage]:
    """Returns the stages for one version, in order."""
    venv = f"build/vllm/{version}"
    setup = ["env", f"KVTIER_VENV={venv}", f"KVTIER_VLLM_VERSION={version}", "tools/setup.sh", "full"]
    name = f"vllm-{version}"
    pytest = [
        str(REPO / venv / "bin" / "pytest"),
        f"--junit-xml={LOGS / name}.xml",
        COLOR,
        "--numprocesses=4",
        "--dist=loadfile",
    ]
    return [
        Stage(f"setup-{name}", setup, f"vLLM {version} can be installed.", SETUP_DEADLINE_S),
        Stage(
            name,
            [*pytest, "-m", "not gpu and not fake_gpu", *TESTS],
            f"The scheduler of vLLM {version} stores, loads, preempts and aborts through the connector.",
            TESTS_DEADLINE_S,
            is_pytest=True,
        ),
    ]


def main() -> int:
    """Runs the stages. Returns 0 only if all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}; default: all"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.versions) - set(VERSIONS):
        parser.error(f"unknown version {', '.join(sorted(unknown))}; there are {', '.join(VERSIONS)}")
    return run_all([stage for version in arguments.versions or VERSIONS for stage in stages(version)])


if __name__ == "__main__":
    sys.exit(to_the_end(main))
