"""Packages with drivers of stores, as they look where they are installed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlite_store"


def declare(folder: Path, package: str, drivers: Mapping[str, str], version: str = "1.0") -> Path:
    """Writes what pip would write of a package that declares these drivers, by their schemes. Whoever has
    `folder` on the path has the package installed, as far as entry points go. Returns `folder`."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"{scheme} = {value}" for scheme, value in drivers.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvtier.stores]", *lines, ""]))
    return folder


def declare_example(folder: Path) -> Path:
    """The example package, as its pyproject.toml declares it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    drivers = project["entry-points"]["kvtier.stores"]
    return declare(folder, project["name"], drivers, project["version"])


def write_driver(folder: Path, module: str, scheme: str, source: str) -> Path:
    """A package with one module, which has this source, and a driver in it, `module:open_store`."""
    declare(folder, f"{module}-package", {scheme: f"{module}:open_store"})
    (folder / f"{module}.py").write_text(source)
    return folder
