"""The image, built by Debian's buildah on a base of debootstrap's, and its root as a folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.installation import PLACE, REPO, sources_digest
from tests.deploy.tools import installed

DOCKERFILE = REPO / "deploy" / "container" / "Dockerfile"
STORAGE = PLACE / "buildah"
BUILD_TIMEOUT_S = 1_500
SUITE = "bookworm"


@dataclass(frozen=True)
class Image:
    root: Path
    """Its files; nobody writes to them."""
    environment: dict[str, str]
    user: str
    command: list[str]
    """Entry point, and what it is given by default."""


def _run(*command: object, **more: str) -> str:
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"} | more
    done = subprocess.run(
        list(map(str, command)),
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        pytest.fail(
            f"{' '.join(map(str, command))}: status {done.returncode}\n{(done.stdout + done.stderr)[-8_000:]}"
        )
    return done.stdout


def _buildah(*arguments: object) -> str:
    program = installed("buildah", "buildah")
    return _run(program, "--root", STORAGE / "root", "--runroot", STORAGE / "run", *arguments)


def _base() -> str:
    """The name of an image with Debian and nothing else; the archive is the one that this machine uses."""
    name = f"localhost/kvtier-base:{SUITE}"
    if name in _buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
        return name
    folder = PLACE / "debootstrap"
    shutil.rmtree(folder, ignore_errors=True)
    _run(installed("debootstrap", "debootstrap"), "--variant=minbase", SUITE, folder)
    container = _buildah("from", "scratch").strip()
    _buildah("copy", "--quiet", container, f"{folder}/", "/")
    _buildah("commit", "--quiet", "--rm", container, name)
    shutil.rmtree(folder)
    return name


def build_image() -> Image:
    """Built once for each state of the sources."""
    recipe = b"".join(path.read_bytes() for path in sorted(DOCKERFILE.parent.iterdir()))
    digest = hashlib.sha256(recipe + sources_digest().encode()).hexdigest()[:16]
    name = f"localhost/kvtier:{digest}"
    STORAGE.mkdir(parents=True, exist_ok=True)
    if name not in _buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
        unmount_images()
        _buildah("rm", "--all")
        for old in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
            if old.startswith("localhost/kvtier:"):
                _buildah("rmi", old)
        base = _base()
        trusted = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile or ""
        pip = STORAGE / "pip.conf"
        pip.write_text("[global]\ncert = /etc/trusted-here.crt\n" if trusted else "")
        volumes = ["--volume", f"{pip}:/etc/pip.conf:ro"]
        if trusted:  # what this machine trusts may be more than what a bare Debian does
            volumes += ["--volume", f"{Path(trusted).resolve()}:/etc/trusted-here.crt:ro"]
        _buildah("build", *volumes, "--build-arg", f"BASE={base}", "--file", DOCKERFILE, "--tag", name, ".")
    working = f"kvtier-{digest}"
    if working not in _buildah("containers", "--format", "{{.ContainerName}}"):
        _buildah("from", "--name", working, name)
    root = Path(_buildah("mount", working).strip())  # `unmount_images` when it is not needed any more
    about = json.loads(_buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
    environment = dict(each.split("=", 1) for each in about["Env"])
    return Image(root, environment, about["User"], about["Entrypoint"] + about["Cmd"])


def unmount_images() -> None:
    """The roots of images are folders no more; what was built stays."""
    _buildah("umount", "--all")
    # It counts who has mounted, and keeps a mount of its own.
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted(
        (each for each in mounted if Path(each).is_relative_to(STORAGE)), key=len, reverse=True
    ):
        subprocess.run(["umount", place], check=True, timeout=60)
