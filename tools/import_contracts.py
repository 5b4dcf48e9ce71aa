"""An import-linter contract that says what a package may import; the built-in types say only what it may not.

A new dependency, or a new package of ours, is then refused until somebody decides that it is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


def _names(field: object) -> set[str]:
    """The values of a list field; import-linter's descriptors are typed as the field, not as its value."""
    return {str(name) for name in cast(Iterable[object], field or ())}


def _within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class ImportsContract(Contract):
    """Checks the direct imports of `package` and everything below it.

    only: packages it may import, besides itself; the word `stdlib` is the standard library. Optional.
    never: packages it may not import even so; a part of the standard library, for one. Optional.
    unreachable: packages that no chain of imports may lead to. Optional.

    A package that does not exist yet keeps the contract, with a warning.
    """

    package = fields.StringField()
    only = fields.ListField(subfield=fields.StringField(), required=False)
    never = fields.ListField(subfield=fields.StringField(), required=False)
    unreachable = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Returns every import that the contract refuses, with its place in the source."""
        package = str(self.package)
        if package not in graph.modules:
            return ContractCheck(kept=True, warnings=[f"there is no {package} yet"], metadata={"found": []})
        only = _names(self.only)
        allowed = only | {package} | (set(sys.stdlib_module_names) if "stdlib" in only else set())
        never = _names(self.never)
        found = []
        for importer in sorted({package} | graph.find_descendants(package)):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if (only and not _within(imported, allowed)) or _within(imported, never):
                    for detail in graph.get_import_details(importer=importer, imported=imported):
                        found.append(f"{importer}:{detail['line_number']}: {detail['line_contents']}")
        for target in sorted(_names(self.unreachable)):
            if target in graph.modules:
                chains = graph.find_shortest_chains(importer=package, imported=target, as_packages=True)
                found += [" -> ".join(chain) for chain in sorted(chains)]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints one line per refused import."""
        for line in check.metadata["found"]:
            output.print_error(line, bold=False)
        output.new_line()
