"""Builds the wheel as an installer would, installs it with the oldest libraries that it allows, and imports
it.

This proves three things that the editable environment cannot: the wheel is complete, the lower bounds in
pyproject.toml are true, and the light client needs neither the daemon's libraries nor torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
UV = str(Path(sys.executable).parent / "uv")
TIMEOUT_S = 280

# This runs inside the installed environment, away from the source tree.
PROBE = """
import importlib, importlib.metadata, sys
for name in ("kvtier", "kvtier.v1.cache_pb2", "kvtier.v1.cache_pb2_grpc", "kvtier.v1.admin_pb2_grpc",
             "kvtier.v1.side_pb2", "kvtier_kernels._native"):
    importlib.import_module(name)
    assert "site-packages" in sys.modules[name].__file__, sys.modules[name].__file__
heavy = {"torch", "vllm", "kvtierd", "uvloop", "prometheus_client", "click"} & set(sys.modules)
assert not heavy, f"importing the client loads {sorted(heavy)}"
print({name: importlib.metadata.version(name) for name in ("grpcio", "numpy", "protobuf")})
"""


def oldest_requirements() -> list[str]:
    """Returns the base dependencies, each at the lower bound that pyproject.toml names."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    return [requirement.replace(">=", "==") for requirement in project["dependencies"]]


def main() -> int:
    """Returns 0 if the wheel builds, installs and imports."""
    with tempfile.TemporaryDirectory(prefix="kvtier-wheel-") as scratch:
        build = [UV, "build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir", scratch]
        build += ["--config-setting", f"build-dir={scratch}/build"]
        subprocess.run(build, cwd=REPO, timeout=TIMEOUT_S, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        run = [UV, "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable]
        run += [f"--with={requirement}" for requirement in (*oldest_requirements(), str(wheel))]
        run += ["python", "-I", "-c", PROBE]
        subprocess.run(run, cwd=scratch, timeout=TIMEOUT_S, check=True)
    print("The light client works with the oldest libraries that it names.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
