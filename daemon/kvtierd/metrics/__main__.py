"""Prints the list of all metrics, as Markdown."""

from kvtierd.metrics.declared import as_markdown

if __name__ == "__main__":
    print(as_markdown(), end="")
