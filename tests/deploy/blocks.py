"""A client as a program, for other namespaces, users and machines: stores blocks, or loads and compares them.

    python -m tests.deploy.blocks SOCKET store|load NAME COUNT

Prints how many blocks were stored, or were hit and had the right bytes, every one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.plain_client import BLOCKS, PlainClient, block_hashes


def main(socket: Path, verb: str, name: str, count: int) -> int:
    done = 0
    with PlainClient(socket, f"{verb}-{name}") as plain:
        plain.ready()
        for first in range(0, count, BLOCKS):
            hashes = block_hashes(name, range(first, min(first + BLOCKS, count)))
            if verb == "load":
                done += plain.load(hashes)
            elif plain.store(hashes).done:
                done += len(hashes)
    return done


if __name__ == "__main__":
    _, socket, verb, name, count = sys.argv
    print(main(Path(socket), verb, name, int(count)))
