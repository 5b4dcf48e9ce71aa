"""Generates what is committed but not written by hand: the protobuf code, the enumeration of reasons, and the
native module's type stub.

    python tools/generate.py            writes into the source tree
    python tools/generate.py --check    writes into a temporary folder and fails if the source tree differs

The proto path is the Python path: proto/kvtier/v1/*.proto becomes kvtier/v1/*_pb2.py under clients/. The
compiler is an old one on purpose: its code runs on protobuf 5.29, which engines pin, and on today's; a new
compiler's code would refuse 5.29. It runs in an environment of its own, because it needs an old protobuf.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
COMPILER = ("grpcio-tools==1.66.2", "mypy-protobuf==3.6.0")
# The import root of each top-level folder of proto/.
ROOTS = {"kvtier": "clients", "kvtierd": "daemon"}
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
STUB = Path("kernels/kvtier_kernels/_native.pyi")
REASONS = Path("kernels/kvtier_kernels/reasons.py")
"""Where the client and the daemon's core, which imports no protobuf, have their reasons from."""
REASONS_PROTO = Path("proto/kvtier/v1/types.proto")
COMPILE_TIMEOUT_S = 300


class GenerationError(Exception):
    """A generator failed. The message is its output."""


def run(command: list[str]) -> None:
    """Runs a command in the repository's root. Raises GenerationError, with its output, if it fails."""
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise GenerationError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def generate_protos(out: Path) -> None:
    """Compiles every file under proto/ into `out`, which is laid out as the repository is."""
    for package, root in ROOTS.items():
        sources = sorted(path.relative_to(REPO) for path in (REPO / "proto" / package).rglob("*.proto"))
        if not sources:
            continue
        target = out / root
        target.mkdir(parents=True, exist_ok=True)
        compiler = [str(Path(sys.executable).parent / "uv"), "run", "--quiet", "--no-project", "--isolated"]
        compiler += ["--python", sys.executable, *(f"--with={requirement}" for requirement in COMPILER)]
        outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        run([*compiler, "python", "-m", "grpc_tools.protoc", "-Iproto", *outputs, *map(str, sources)])
        for folder in {(target / source.relative_to("proto")).parent for source in sources}:
            drop_empty_services(folder)
            init = folder / "__init__.py"
            if out == REPO and not init.exists():
                name = ".".join(folder.relative_to(target).parts)
                source = "proto/" + name.replace(".", "/")
                init.write_text(f'"""Code generated from {source} by `make generate`; do not edit."""\n')


def drop_empty_services(folder: Path) -> None:
    """Removes the gRPC modules of files that define no service, which hold nothing but an import of grpc."""
    for module in folder.glob("*_pb2_grpc.py"):
        if "class " not in module.read_text():
            module.unlink()
            module.with_suffix(".pyi").unlink(missing_ok=True)


def generate_stub(out: Path) -> None:
    """Writes the type stub of the installed native module into `out`."""
    target = out / STUB
    target.parent.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "kvtier_kernels._native", "-o", str(target)])


def generate_reasons(out: Path) -> None:
    """Writes the contract's `enum Reason` into `out` as a Python enumeration, comments included."""
    proto = (REPO / REASONS_PROTO).read_text()
    found = re.search(r"((?:^//[^\n]*\n)+)^enum Reason \{\n(.*?)^\}", proto, re.MULTILINE | re.DOTALL)
    if found is None:
        raise GenerationError(f"{REASONS_PROTO} has no documented enum Reason")
    about = " ".join(line.removeprefix("//").strip() for line in found[1].splitlines())
    lines = [
        f'"""Code generated from {REASONS_PROTO} by `make generate`; do not edit."""',
        "",
        "from enum import IntEnum",
        "",
        "",
        "class Reason(IntEnum):",
        f'    """{about}"""',
        "",
    ]
    for line in found[2].splitlines():
        value, _, comment = (part.strip() for part in line.partition("//"))
        parts = [value.removeprefix("REASON_").removesuffix(";"), f"# {comment}" if comment else ""]
        lines.append("    " + "  ".join(filter(None, parts)))
    (out / REASONS).parent.mkdir(parents=True, exist_ok=True)
    (out / REASONS).write_text("\n".join(lines) + "\n")


def generated_files(tree: Path) -> dict[str, bytes]:
    """Returns the generated files of a tree, by their path in it."""
    roots = [tree / root for root in ROOTS.values()]
    found = [path for root in roots for pattern in GENERATED for path in root.rglob(pattern)]
    found += [tree / name for name in (STUB, REASONS) if (tree / name).exists()]
    return {str(path.relative_to(tree)): path.read_bytes() for path in found}


def differences() -> list[str]:
    """Returns one line per committed file that is missing, left over, or not what the generators
    write now."""
    with tempfile.TemporaryDirectory(prefix="kvtier-generate-") as scratch:
        generate_protos(Path(scratch))
        generate_reasons(Path(scratch))
        generate_stub(Path(scratch))
        expected, present = generated_files(Path(scratch)), generated_files(REPO)
    report = [f"missing: {name}" for name in expected.keys() - present.keys()]
    report += [f"nothing generates it any more: {name}" for name in present.keys() - expected.keys()]
    both = expected.keys() & present.keys()
    report += [f"out of date: {name}" for name in both if expected[name] != present[name]]
    return sorted(report)


def main() -> int:
    """Runs the generators, or compares with --check. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Generate protobuf code, the reasons and the native module's stub."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    parser.add_argument("--protos-only", action="store_true", help="leave the native module's stub alone")
    options = parser.parse_args()
    try:
        if options.check:
            if report := differences():
                print("\n".join(report))
                print("Run `make generate` and commit the result.")
                return 1
            print("Generated code is up to date.")
            return 0
        for name in generated_files(REPO):
            if name != str(STUB):  # a file that its proto no longer makes must not linger
                (REPO / name).unlink()
        generate_protos(REPO)
        generate_reasons(REPO)
        if not options.protos_only:
            generate_stub(REPO)
    except GenerationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
