"""Prints docs/configure.md, which is made of the configuration's own declarations.

python -m tools.configure_page > docs/configure.md
"""

from __future__ import annotations

from kvtierd.config import daemon as config
from kvtierd.config import settings
from kvtierd.config.reload import LIVE

HEAD = """# Configure kvtier

A setting `size` of section `pool` is `[pool]` and `size = "64GiB"` in the file (`--config`,
`KVTIER_CONFIG`, else `/etc/kvtier/kvtierd.toml`), which the environment overrides
(`KVTIER_POOL_SIZE`), which flags override (`--pool-size`). One setting has a shorter name
besides: `socket` of `server` is `--socket` and `KVTIER_SOCKET`, for the daemon, `kvtierctl` and
clients alike; `--server-socket` and `KVTIER_SERVER_SOCKET` are understood too, and refused where
both are given and differ.

All that is wrong is told at once: unknown names (variables that begin with `KVTIER_` among them),
with the nearest known one, and values that cannot be used, with where they came from. `kvtierd
config check` looks without starting; `kvtierd config show` prints all of them with what is in
force and from where. *live*: `kvtierctl reload`, or `systemctl reload kvtierd`, takes it over
while the daemon runs. This page is made of the program's own declarations; a test keeps it so.

Sizes are a number of bytes, or a number with a unit, in upper or lower case. As in Kubernetes'
quantities, `i` makes a unit binary: `64Gi` or `64GiB` is 64 × 2^30 bytes; `64G`, `64g` or `64GB`
is 64 × 10^9. `K`, `M`, `T` and `P` likewise. Seconds are numbers without a unit (`2.5`),
fractions numbers above 0 and up to 1 (`0.25`).
"""


def page() -> str:
    """Returns the whole page."""
    lines = [HEAD]
    section = ""
    sentences = dict(settings.section_sentences(config.Config))
    for item in settings.declared(config.Config):
        if item.section != section:
            section = item.section
            lines += [f"## {section}", "", sentences[section], ""]
            lines += ["| setting | default | means |", "|---|---|---|", *rows(section), ""]
    return "\n".join(lines).rstrip() + "\n"


def rows(section: str) -> list[str]:
    """Returns a table's rows: every setting of one section."""
    found = []
    for item in settings.declared(config.Config):
        if item.section == section:
            default = config.as_toml(item, item.default).replace("|", "\\|")
            live = " *live*" if item.key in LIVE else ""
            sentence = item.sentence.replace("|", "\\|")
            found.append(f"| `{item.name}`{live} | `{default}` | {sentence} |")
    return found


if __name__ == "__main__":
    print(page(), end="")
