"""Which stages have passed already on exactly this tree, so that a long run that was stopped can go on.

With KVTIER_RESUME=1, stages that have passed since nothing was changed are not repeated. A tree counts only
if everything in it is committed, before and after a stage.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "KVTIER_RESUME"


def committed_tree(repository: Path) -> str:
    """The name that git has for the content of the tree; empty if something is not committed, or there is no
    git."""
    try:
        changed, tree = (
            subprocess.run(
                ["git", *arguments], cwd=repository, capture_output=True, text=True, check=True, timeout=60
            ).stdout.strip()
            for arguments in (["status", "--porcelain"], ["rev-parse", "HEAD^{tree}"])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return "" if changed else tree


@dataclass(frozen=True)
class Passed:
    """What is noted in a folder about stages of this tree."""

    folder: Path
    repository: Path
    resume: bool

    def when(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """When this stage passed on this tree; empty if it did not, or is to be repeated."""
        if not self.resume or not (key := self._key(command, environment)):
            return ""
        try:
            noted = json.loads(self._file(name).read_text())
            return str(noted["when"]) if noted["key"] == key else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def note(self, name: str, command: Sequence[str], environment: Mapping[str, str], tree: str) -> None:
        """A stage has passed that began on this tree."""
        key = self._key(command, environment)
        if tree and key and tree == committed_tree(self.repository):
            when = time.strftime("%Y-%m-%d %H:%M")
            self._file(name).write_text(json.dumps({"key": key, "when": when}))

    def forget(self, name: str) -> None:
        """A stage begins."""
        self._file(name).unlink(missing_ok=True)

    def _key(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        tree = committed_tree(self.repository)
        told = json.dumps([tree, list(command), sorted(environment.items())])
        return hashlib.sha256(told.encode()).hexdigest() if tree else ""

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.passed"
