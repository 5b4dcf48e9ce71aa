"""Prints docs/configure.md, which is made of the configuration's own declarations.

python -m tools.configure_page > docs/configure.md
"""

from __future__ import annotations

from kvtierd.config import daemon as config
from kvtierd.config import settings
from kvtierd.config.reload import LIVE

HEAD = """# Configure kvtier

The setting `size` of section `pool` is written `[pool]` and `size = "64GiB"` in the file
(`--config`, `KVTIER_CONFIG`, else `/etc/kvtier/kvtierd.toml`). The environment
(`KVTIER_POOL_SIZE`) overrides the file, and flags (`--pool-size`) override both. One setting has a
shorter name as well: `socket` of `server` is `--socket` and `KVTIER_SOCKET`, for the daemon,
`kvtierctl` and clients alike. Its longer names, `--server-socket` and `KVTIER_SERVER_SOCKET`, work
too, and are refused if both names are given and differ.

All mistakes are reported at once: unknown names (also of variables that begin with `KVTIER_`),
with the nearest known name, and values that cannot be used, with where they came from. `kvtierd
config check` checks without starting; `kvtierd config show` prints every setting, its value in
force, and where that came from. Settings marked *live* are taken over by `kvtierctl reload`, or
`systemctl reload kvtierd`, while the daemon runs. This page is made of the program's own
declarations; a test keeps it so.

Sizes are a number of bytes, or a number with a unit, in upper or lower case. As in Kubernetes'
quantities, `i` makes a unit binary: `64Gi` or `64GiB` is 64 × 2^30 bytes; `64G`, `64g` or `64GB`
is 64 × 10^9. The same goes for `K`, `M`, `T` and `P`. Seconds are numbers without a unit (`2.5`),
fractions are numbers above 0 and up to 1 (`0.25`).
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
