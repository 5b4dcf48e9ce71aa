"""The bills of materials of a release name what is in it, and are what CycloneDX's schema says."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

from tools import locks, sbom

METADATA = """Metadata-Version: 2.4
Name: kvtier
Version: 1.2.3
License-Expression: Apache-2.0
Requires-Dist: grpcio>=1.66.2
Requires-Dist: numpy
Provides-Extra: daemon
Requires-Dist: click>=8.1; extra == "daemon"

The text.
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier-1.2.3-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("kvtier-1.2.3.dist-info/METADATA"), METADATA)
    return path


@pytest.fixture
def bills(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    written = sbom.write([wheel], tmp_path)
    return {path.name: json.loads(path.read_text()) for path in written}


def parts(bill: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in bill["components"]}


def licence(part: dict[str, Any]) -> str:
    [choice] = part["licenses"]
    name: str = choice["license"]["id"]
    return name


def test_a_wheel_has_its_code_and_what_it_needs(wheel: Path, bills: dict[str, dict[str, Any]]) -> None:
    bill = bills[f"{wheel.name}.cdx.json"]
    subject, found = bill["metadata"]["component"], parts(bill)
    assert (subject["name"], subject["version"], licence(subject)) == ("kvtier", "1.2.3", "Apache-2.0")
    assert subject["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert set(found) == {"nanobind", "robin-map", "xxHash", "grpcio", "numpy", "click"}
    assert (found["xxHash"]["version"], licence(found["xxHash"])) == ("0.8.4", "BSD-2-Clause")
    assert found["xxHash"]["purl"] == "pkg:github/cyan4973/xxhash@v0.8.4"
    assert (licence(found["nanobind"]), licence(found["robin-map"])) == ("BSD-3-Clause", "MIT")
    assert [found[name]["scope"] for name in ("grpcio", "numpy", "click")] == ["required"] * 2 + ["optional"]
    assert {"name": "kvtier:requires", "value": ">=1.66.2"} in found["grpcio"]["properties"]
    assert {"name": "kvtier:extra", "value": "daemon"} in found["click"]["properties"]
    [depends] = [each for each in bill["dependencies"] if each["ref"] == subject["bom-ref"]]
    assert len(depends["dependsOn"]) == len(found)


def test_the_versions_of_what_is_compiled_in_are_those_of_the_sources(
    bills: dict[str, dict[str, Any]],
) -> None:
    header = (sbom.THIRD_PARTY / "xxhash" / "xxhash.h").read_text()
    version = ".".join(
        found[1]
        for name in ("MAJOR", "MINOR", "RELEASE")
        if (found := re.search(rf"define XXH_VERSION_{name} +(\d+)", header))
    )
    for bill in bills.values():
        assert parts(bill)["xxHash"]["version"] == version
        assert parts(bill)["nanobind"]["version"]
    assert {path.name for path in sbom.THIRD_PARTY.iterdir() if path.is_dir()} == {"xxhash"}, "all are named"


def test_the_image_has_every_locked_package_with_its_hashes(bills: dict[str, dict[str, Any]]) -> None:
    found = parts(bills[sbom.IMAGE])
    for name, wanted in locks.requirements().items():
        text = (locks.FOLDER / name).read_text()
        for package, version in re.findall(r"^([\w.-]+)==(\S+) ", text, re.MULTILINE):
            assert found[package]["version"] == version
        for requirement in map(Requirement, wanted):
            assert requirement.name in found
    hashes = {each["content"] for each in found["grpcio"]["hashes"]}
    text = (locks.FOLDER / "daemon.lock").read_text()
    entry = text[text.index("grpcio==") :].partition("grpcio-health")[0]
    assert hashes == set(re.findall(r"sha256:([0-9a-f]{64})", entry))
    assert {found[name]["scope"] for name in ("cmake", "ninja", "scikit-build-core")} == {"excluded"}
    assert [each["version"] for each in found.values() if each["type"] == "container"] != []
    assert found["kvtier"]["type"] == "application"


def test_the_same_sources_make_the_same_bills(
    wheel: Path, bills: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    again = {path.name: json.loads(path.read_text()) for path in sbom.write([wheel], tmp_path)}
    assert again == bills
    assert {each["metadata"]["timestamp"] for each in bills.values()} == {"2023-11-14T22:13:20+00:00"}
    assert len({each["serialNumber"] for each in bills.values()}) == len(bills)


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    "a hash": lambda bill: bill["components"][0].update(hashes=[{"alg": "SHA-256", "content": "no"}]),
    "a name": lambda bill: bill["components"][0].pop("name"),
    "a field": lambda bill: bill.update(more="x"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_schema_finds_what_is_wrong(bills: dict[str, dict[str, Any]], what: str) -> None:
    validator = JsonStrictValidator(sbom.VERSION)
    for bill in bills.values():
        assert validator.validate_str(json.dumps(bill)) is None, "the control"
        CHANGES[what](bill)
        assert validator.validate_str(json.dumps(bill)) is not None
