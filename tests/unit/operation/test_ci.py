"""The workflow of continuous integration runs what a desk can run, on what the project says it supports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tools import wheels

REPO = Path(__file__).resolve().parents[3]
WORKFLOW: dict[Any, Any] = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]


def commands() -> list[str]:
    return [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


def test_every_make_target_of_it_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    wanted = {command.split()[1] for command in commands() if command.startswith("make ")}
    assert wanted == {"test-light", "wheels"}
    assert wanted <= targets
    assert ".ci/run" in commands()


def test_its_pythons_are_those_that_wheels_are_made_for_and_the_package_names() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    supported = {each.rpartition(" ")[2] for each in project["classifiers"] if " :: 3." in each}
    assert set(JOBS["light"]["strategy"]["matrix"]["python"]) == supported
    assert {f"3.{minor}" for minor in wheels.MINORS} == supported


def test_both_processors_are_tested_and_built_for() -> None:
    machines = JOBS["light"]["strategy"]["matrix"]["machine"]
    assert any(machine.endswith("-arm") for machine in machines)
    assert any(not machine.endswith("-arm") for machine in machines)
    assert {each["arch"] for each in JOBS["wheels"]["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}


def test_every_job_ends_and_may_only_read() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] > 0 for job in JOBS.values())


def test_actions_are_named_by_their_commits() -> None:
    """A tag may be moved to another commit by whoever gets hold of the action's repository."""
    uses = re.findall(r"uses: (.*)", (REPO / ".github/workflows/ci.yml").read_text())
    assert len(uses) >= 8
    assert not [
        each for each in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)
    ]
