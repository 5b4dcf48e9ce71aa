"""Builds the documentation site into build/site: `make docs`, or python -m tools.docs_site

The Markdown files stay where readers of the repository look for them: in the root, in docs/, examples/ and
tests/. They are copied, with all that they link to, into one folder of the same shape, so that a link leads
to the same place in both. The generator, Zensical, does the rest (zensical.toml). It runs strictly, so a link
or an anchor that leads nowhere is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SOURCE = REPO / "build" / "site-source"
SITE = REPO / "build" / "site"
COPIED = (
    "*.md",
    "LICENSE",
    "docs/**/*",
    "examples/*",
    "tests/gpu/README.md",
    "tests/gpu/results/*/README.md",
    "tests/fake_cuda/README.md",
    "deploy/**/*",
    "proto/**/*.proto",
    "clients/kvtier/connection/*.py",
    "daemon/kvtierd/**/*.py",
    "kernels/native/*.cpp",
)
"""The pages, and what they link to."""
AWAITED = ("docs/protocol.md",)
"""Pages that others may link to before they are written: a missing one gets a placeholder in the site."""
BUILD_TIMEOUT_S = 120


def stage(out: Path) -> list[Path]:
    """Copies everything into `out`, which is emptied first. Returns the pages, relative to `out`."""
    shutil.rmtree(out, ignore_errors=True)
    for pattern in COPIED:
        for path in REPO.glob(pattern):
            if path.is_file():
                target = out / path.relative_to(REPO)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    for name in AWAITED:
        if not (out / name).exists():
            (out / name).write_text(f"# {Path(name).stem}\n\nThis page has not been written yet.\n")
    return sorted(path.relative_to(out) for path in out.rglob("*.md"))


def build() -> subprocess.CompletedProcess[str]:
    """Runs the generator on the copied files. Its output says what is wrong."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
    return subprocess.run(
        command,
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )


def main() -> int:
    """Returns 0 only if nothing is wrong."""
    pages = stage(SOURCE)
    built = build()
    if built.returncode:
        print(built.stdout, file=sys.stderr)
        print("Some links lead nowhere, or something else is wrong: see above.", file=sys.stderr)
        return 1
    print(f"{len(pages)} pages, every link and anchor leads somewhere: {SITE / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
