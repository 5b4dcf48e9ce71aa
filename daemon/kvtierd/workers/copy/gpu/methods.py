"""Which way of copying is the fastest for small fragments, on the GPUs that have been measured.

`methods.json` has, for each product and direction, sizes in rising order and the method up to each:

    {"format": 1, "products": {"NVIDIA H200": {"to_device": [{"most_bytes": 16384, "method": "rows"}]}}}

What it does not name is copied in batches. `tests/gpu/report.py` writes such a file from the step `shapes`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).with_name("methods.json")
FORMAT: Final = 1
METHODS: Final = ("loop", "rows")


@dataclass(frozen=True, slots=True)
class MeasuredMethod:
    """The method for blocks whose fragments have at most so many bytes, on average."""

    most_bytes: int
    method: str


def measured_methods(product: str, *, to_device: bool, table: Path = TABLE) -> tuple[MeasuredMethod, ...]:
    """Returns what the table says of a GPU, smallest size first; empty if it does not know it. Raises
    ValueError, which names the file, if that is not such a table."""
    try:
        content = json.loads(table.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format is {content['format']!r}")
        entries = content["products"].get(product, {}).get("to_device" if to_device else "to_host", [])
        found = tuple(MeasuredMethod(int(entry["most_bytes"]), str(entry["method"])) for entry in entries)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{table}: not a table of copy methods ({error})") from error
    sizes = [one.most_bytes for one in found]
    if sizes != sorted(set(sizes)) or any(one.method not in METHODS for one in found):
        raise ValueError(f"{table}: {product}: sizes must rise, and methods be one of {', '.join(METHODS)}")
    return found
