"""`python -m kvtierd.tiers.store URL`: whether the driver for a store can be imported. It prints one line of
JSON, and asks no store. Its own process, because what is imported may be anybody's code."""

import contextlib
import json
import sys

from kvtierd.core.errors import Refusal
from kvtierd.tiers.store.drivers import find_driver, load_driver, package_of


def main(url: str) -> dict[str, str]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            load_driver(url)
        return {"package": package_of(find_driver(url))}
    except Refusal as refusal:
        return {"error": refusal.message}


if __name__ == "__main__":
    print(f"\n{json.dumps(main(sys.argv[1]))}")
