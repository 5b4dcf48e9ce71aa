"""Checks that no two public classes of the product have the same name, so that a name tells what it is.

    python tools/class_names.py

Generated code is left out, because the protocol names its classes and hand-written code mirrors some of them.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PRODUCT = ("clients", "daemon", "kernels")
PROTOCOL = (
    "The core's protocol and the native class that fulfils it are one thing; the core imports no native code."
)
ALLOWED = {
    "BlockTable": PROTOCOL,
    "HoldCounts": PROTOCOL,
    "IndexPage": PROTOCOL,
    "PoolShadow": PROTOCOL,
    "Client": "kvtier.aio.Client is to be AsyncClient.",
    "LookupCall": "kvtier.aio.LookupCall is to be AsyncLookupCall.",
    "Transfer": "kvtier.aio.Transfer is to be AsyncTransfer.",
}
"""Names that two classes may have, and why."""


def modules() -> Iterable[Path]:
    """Yields every hand-written module of the product."""
    for folder in PRODUCT:
        for path in sorted((REPO / folder).rglob("*.py*")):
            if path.suffix in (".py", ".pyi") and not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path


def places(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Returns where each public class is defined, as `path:line`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(REPO)}:{node.lineno}")
    return found


def main() -> int:
    """Prints what is wrong. Returns how many names are."""
    found = {name: where for name, where in places(modules()).items() if len(where) > 1}
    wrong = {name: where for name, where in sorted(found.items()) if name not in ALLOWED}
    for name, where in wrong.items():
        print(
            f"{name} is the name of {len(where)} classes: {', '.join(where)}. Rename one towards what it is."
        )
    gone = sorted(ALLOWED.keys() - found.keys())
    for name in gone:
        print(
            f"{name} is the name of one class at most by now: take it out of ALLOWED in tools/class_names.py."
        )
    return len(wrong) + len(gone)


if __name__ == "__main__":
    sys.exit(main())
