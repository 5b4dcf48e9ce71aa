"""Prints docs/configure.md, made of the configuration's own declarations.

python -m tools.configure_page > docs/configure.md
"""

from __future__ import annotations

from kvtierd import config, settings
from kvtierd.reload import LIVE

HEAD = """# Configure kvtier

A setting `size` of section `pool` is `[pool]` and `size = "64GiB"` in the file (`--config`, `KVTIER_CONFIG`,
else `/etc/kvtier/kvtierd.toml`), which the environment overrides (`KVTIER_POOL_SIZE`), which flags override
(`--pool-size`). Unknown names and values that cannot be used are refused at start, by name. `kvtierd config
check` looks without starting; `kvtierd config show` prints all of them with what is in force and from where.
*live*: `kvtierctl reload`, or `systemctl reload kvtierd`, takes it over while the daemon runs. This page is
made of the program's own declarations; a test keeps it so.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    section = ""
    sentences = dict(settings.sections(config.Config))
    for item in settings.declared(config.Config):
        if item.section != section:
            section = item.section
            lines += [f"## {section}", "", sentences[section], ""]
            lines += ["| setting | default | means |", "|---|---|---|", *rows(section), ""]
    return "\n".join(lines).rstrip() + "\n"


def rows(section: str) -> list[str]:
    """A table's rows: every setting of one section."""
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
