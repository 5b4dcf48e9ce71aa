"""What a release is made of, for programs: bills of materials of wheels and image, in CycloneDX's JSON.

    python -m tools.sbom [--out DIR] WHEEL...

Each wheel has one, named like it: the project, the code of others that is compiled into the native core, with
versions and licences, and what has to be installed for it to run, as its own metadata says. The container
image has one of the lock files: every Python package in it, and every tool that builds it, with its version
and hashes. Debian's packages are in neither: they are what its archive has when an image is built.

The same sources make the same bills: their time is that of the archives (SOURCE_DATE_EPOCH), and their serial
numbers follow from what they describe.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import os
import re
import sys
import time
import tomllib
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parent.parent
CONTAINER = REPO / "deploy" / "container"
THIRD_PARTY = REPO / "kernels" / "third_party"
VERSION = SchemaVersion.V1_6
SUFFIX = ".cdx.json"
IMAGE = f"kvtier-image{SUFFIX}"
REQUIRED, OPTIONAL, EXCLUDED = ComponentScope.REQUIRED, ComponentScope.OPTIONAL, ComponentScope.EXCLUDED


def of_wheel(wheel: Path) -> Bom:
    """Returns the bill of a wheel, from its metadata and from what the checkout says that is compiled in."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(metadata))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    project = _component(
        about["Name"],
        about["Version"],
        licence=about["License-Expression"],
        digests=[digest],
        kind="application",
    )
    compiled = list(_compiled_in())
    required = [_required(Requirement(each)) for each in about.get_all("Requires-Dist") or ()]
    return _bill(project, [*compiled, *required], digest)


def of_image() -> Bom:
    """Returns the bill of the container image's Python packages, from the lock files."""
    about = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    image = Component(
        name="kvtier-image", version=about["version"], type=ComponentType.CONTAINER, bom_ref="kvtier-image"
    )
    parts = [
        Component(name=name, version=tag, type=ComponentType.CONTAINER, bom_ref=f"image:{name}:{tag}")
        for name, tag in _bases()
    ]
    parts.append(_component(about["name"], about["version"], licence=about["license"], kind="application"))
    parts += _locked("daemon.lock", REQUIRED)
    compiled = list(_compiled_in())
    there = {part.name for part in [*parts, *compiled]}
    parts += [part for part in _locked("build.lock", EXCLUDED) if part.name not in there]
    parts += compiled
    locks = b"".join((CONTAINER / name).read_bytes() for name in ("Dockerfile", "daemon.lock", "build.lock"))
    return _bill(image, parts, hashlib.sha256(locks).hexdigest())


def as_json(bill: Bom) -> str:
    """Returns a bill as text. Raises ValueError if it is not what the schema says."""
    text = make_outputter(bill, OutputFormat.JSON, VERSION).output_as_string(indent=2) + "\n"
    if errors := JsonStrictValidator(VERSION).validate_str(text):
        raise ValueError(f"the bill of {bill.metadata.component} does not match CycloneDX's schema: {errors}")
    return text


def write(wheels: Iterable[Path], out: Path) -> list[Path]:
    """Writes the bills of wheels and of the image into `out`, and returns their paths."""
    bills = {f"{wheel.name}{SUFFIX}": of_wheel(wheel) for wheel in wheels} | {IMAGE: of_image()}
    for name, bill in bills.items():
        (out / name).write_text(as_json(bill))
    return [out / name for name in bills]


def _compiled_in() -> Iterator[Component]:
    """What of others is in the native core."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [nanobind] = [each.partition("==")[2] for each in extras["dev"] if each.startswith("nanobind==")]
    note = [Property(name="kvtier:how", value="compiled into kvtier_kernels")]
    yield _component("nanobind", nanobind, licence="BSD-3-Clause", properties=note)
    from_nanobind = [Property(name="kvtier:how", value="compiled into kvtier_kernels, as a part of nanobind")]
    yield Component(
        name="robin-map",
        licenses=[DisjunctiveLicense(id="MIT")],
        purl=PackageURL("github", "Tessil", "robin-map"),
        bom_ref="robin-map",
        properties=from_nanobind,
    )
    for folder in sorted(path for path in THIRD_PARTY.iterdir() if path.is_dir()):
        yield _vendored(folder, note)


def _vendored(folder: Path, properties: Iterable[Property]) -> Component:
    """A library whose source lies in the checkout; its README says which release of what it is. Raises
    ValueError if it does not."""
    text = " ".join((folder / "README.md").read_text().split())
    found = re.search(r"of (\S+) (\d[\d.]*\d) \(([\w.-]+), https://github\.com/([\w-]+)/([\w-]+)\)", text)
    if found is None:
        raise ValueError(
            f"{folder}/README.md has to say: `… of NAME VERSION (LICENCE, https://github.com/OWNER/NAME)`"
        )
    name, version, licence, owner, repository = found.groups()
    return Component(
        name=name,
        version=version,
        licenses=[DisjunctiveLicense(id=licence)],
        purl=PackageURL("github", owner, repository, f"v{version}"),
        bom_ref=f"{name}@{version}",
        properties=properties,
    )


def _required(requirement: Requirement) -> Component:
    """A package that a wheel needs, or needs with one of its extras."""
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
    about = [Property(name="kvtier:requires", value=str(requirement.specifier) or "any version")]
    if extra:
        about.append(Property(name="kvtier:extra", value=extra[1]))
    return _component(requirement.name, scope=OPTIONAL if extra else REQUIRED, properties=about)


def _locked(name: str, scope: ComponentScope) -> Iterator[Component]:
    """The packages of a lock file. The hashes of each are those of all files that may be installed."""
    joined = (CONTAINER / name).read_text().replace("\\\n", " ")
    for line in joined.splitlines():
        if found := re.match(r"([\w.-]+)==([\w.+-]+)\s", line):
            digests = re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
            yield _component(found[1], found[2], scope=scope, digests=digests)


def _bases() -> list[tuple[str, str]]:
    """Names and tags of the images that the image is based on, unless who builds it names others."""
    text = (CONTAINER / "Dockerfile").read_text()
    found = re.findall(r"^ARG \w+=([\w./-]+):([\w.-]+)$", text, re.MULTILINE)
    return sorted(set(found))


def _component(
    name: str,
    version: str | None = None,
    *,
    licence: str = "",
    scope: ComponentScope | None = None,
    digests: Iterable[str] = (),
    properties: Iterable[Property] = (),
    kind: str = "library",
) -> Component:
    """A package of PyPI's."""
    purl = PackageURL("pypi", None, name.lower(), version)
    return Component(
        name=name,
        version=version,
        type=ComponentType(kind),
        licenses=[DisjunctiveLicense(id=licence)] if licence else (),
        purl=purl,
        bom_ref=purl.to_string(),
        scope=scope,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in digests],
        properties=properties,
    )


def _bill(subject: Component, parts: Iterable[Component], digest: str) -> Bom:
    bill = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"kvtier:{digest}"))
    bill.metadata.component = subject
    made_s = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    bill.metadata.timestamp = datetime.fromtimestamp(made_s, UTC)
    bill.register_dependency(subject, bill.components)
    return bill


def main() -> int:
    parser = argparse.ArgumentParser(prog="sbom", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "dist")
    parser.add_argument("wheels", type=Path, nargs="*", metavar="WHEEL")
    arguments = parser.parse_args()
    for path in write(arguments.wheels, arguments.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
