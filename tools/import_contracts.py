"""Contracts for import-linter that its built-in types lack: what a package may import, where those say only
what it may not; and that no modules import each other in a circle, where those look only at
whole packages."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


def _names(field: object) -> set[str]:
    """Returns the values of a list field. import-linter's descriptors are typed as the field, not as its
    value."""
    return {str(name) for name in cast(Iterable[object], field or ())}


def _within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class ImportsContract(Contract):
    """Checks the direct imports of `package` and everything below it. A new dependency, or a new package of
    ours, is refused until somebody decides that it is allowed.

    only: packages that it may import, besides itself; the word `stdlib` is the standard library. Optional.
    never: packages that it may not import even so, such as a part of the standard library. Optional.
    unreachable: packages that no chain of imports may lead to. Optional.
    apart: modules below it that have a contract of their own, and that the others may not import. Optional.

    A package that does not exist yet keeps the contract, with a warning.
    """

    package = fields.StringField()
    only = fields.ListField(subfield=fields.StringField(), required=False)
    never = fields.ListField(subfield=fields.StringField(), required=False)
    unreachable = fields.ListField(subfield=fields.StringField(), required=False)
    apart = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Returns every import that the contract refuses, with its place in the source."""
        package = str(self.package)
        if package not in graph.modules:
            return ContractCheck(kept=True, warnings=[f"there is no {package} yet"], metadata={"found": []})
        only = _names(self.only)
        allowed = only | {package} | (set(sys.stdlib_module_names) if "stdlib" in only else set())
        apart = _names(self.apart)
        never = _names(self.never) | apart
        found = []
        for importer in sorted({package} | graph.find_descendants(package)):
            if _within(importer, apart):
                continue
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


class NoCirclesContract(Contract):
    """Checks that no modules import each other in a circle, wherever the imports stand: in a function too, or
    under `TYPE_CHECKING`. As at run time, importing `a.b` also imports `a`."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Returns circles that have no import in common, each as short as it can be, import by import."""
        _add_packages_that_run(graph)
        circles = []
        while (found := _some_circle(graph)) is not None:
            circle = _shortest(graph, found)
            circles.append([_describe(graph, *step) for step in circle])
            for importer, imported in circle:
                graph.remove_import(importer=importer, imported=imported)
        return ContractCheck(kept=not circles, metadata={"circles": circles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints the imports of each circle, in their order."""
        for circle in check.metadata["circles"]:
            output.print_error(f"{len(circle)} modules import each other in a circle:")
            for line in circle:
                output.print_error(f"  {line}", bold=False)
            output.new_line()


def _add_packages_that_run(graph: ImportGraph) -> None:
    """Adds the imports of packages whose `__init__` runs because something below them is imported."""
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            package = imported.rpartition(".")[0]
            while package in graph.modules and not _within(importer, [package]):
                if not graph.direct_import_exists(importer=importer, imported=package):
                    for detail in graph.get_import_details(importer=importer, imported=imported)[:1]:
                        graph.add_import(
                            importer=importer,
                            imported=package,
                            line_number=detail["line_number"],
                            line_contents=detail["line_contents"],
                        )
                package = package.rpartition(".")[0]


def _some_circle(graph: ImportGraph) -> list[tuple[str, str]] | None:
    """Returns the imports of a circle, as pairs of importer and imported, or None if there is none."""
    # A package seems to import itself if it imports a compiled module of its own, which the graph lacks.
    imports = {
        module: sorted(graph.find_modules_directly_imported_by(module) - {module})
        for module in sorted(graph.modules)
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        # These are the modules, the first again at the end, each imported by the next one.
        modules = list(reversed(error.args[1]))
        return list(pairwise(modules))
    return None


def _shortest(graph: ImportGraph, circle: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the shortest circle that has one of these imports."""
    found = circle
    for importer, imported in circle:
        back = graph.find_shortest_chain(importer=imported, imported=importer)
        assert back is not None
        if len(back) < len(found):
            found = list(pairwise((importer, *back)))
    return found


def _describe(graph: ImportGraph, importer: str, imported: str) -> str:
    detail = graph.get_import_details(importer=importer, imported=imported)[0]
    return f"{importer}:{detail['line_number']}: {detail['line_contents']}"
