"""The block hashes of a prompt, as vLLM computes them: what `kvtierctl explain` asks for.

    python -m kvtier_vllm.hashes --block-tokens 16 prompt.json | kvtierctl explain -

Runs where the engine is installed, with the engine's PYTHONHASHSEED if it has one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier_engine.salts import read_salt


def block_hashes(
    tokens: Sequence[int], block_tokens: int, algorithm: str = "sha256", cache_salt: str | None = None
) -> list[bytes]:
    """Returns the hash of every full block of a prompt without images and adapters, in order. `algorithm` is
    vLLM's `--prefix-caching-hash-algo`. Raises ValueError for one that vLLM does not know."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    request = Request(
        "hashes",
        list(tokens),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(block_tokens, function),
        cache_salt=cache_salt,
    )
    return [bytes(block_hash) for block_hash in request.block_hashes]


def tokens_of(text: str) -> list[int]:
    """Returns the token ids that a text has as a JSON list, or separated by blanks or commas. Raises
    ValueError."""
    content = text.strip()
    if content.startswith("["):
        found = json.loads(content)
    else:
        found = [int(word) for word in content.replace(",", " ").split()]
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise ValueError("token ids are whole numbers that are not negative")
    return found


@contextmanager
def _talk_on_stderr() -> Iterator[None]:
    """Sends standard output to standard error, so that what vLLM logs while it is imported (0.29: on standard
    output) does not come between the hashes."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
        sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the hashes in hexadecimal, one per line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier_vllm.hashes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", help="token ids: a JSON list, or with blanks between them; -: standard input")
    parser.add_argument("--block-tokens", type=int, required=True, help="the engine's block size")
    parser.add_argument("--algorithm", default="sha256", help="the engine's --prefix-caching-hash-algo")
    salts = parser.add_mutually_exclusive_group()
    salts.add_argument(
        "--cache-salt", help="the request's cache_salt, which others can see in the process list"
    )
    salts.add_argument("--cache-salt-file", help="a file that holds it, which not everybody may read")
    given = parser.parse_args(arguments)
    if given.block_tokens < 1:
        parser.error(f"--block-tokens {given.block_tokens}: write the engine's block size, at least 1")
    try:
        tokens = tokens_of(sys.stdin.read() if given.file == "-" else Path(given.file).read_text())
        with _talk_on_stderr():
            file = given.cache_salt_file
            salt = read_salt(str(Path(file).absolute())) if file else given.cache_salt
            hashes = block_hashes(tokens, given.block_tokens, given.algorithm, salt)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for block_hash in hashes:
        print(block_hash.hex())
    return 0


if __name__ == "__main__":
    sys.exit(main())
