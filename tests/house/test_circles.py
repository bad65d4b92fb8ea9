"""No module of the package imports itself in a roundabout way, not even for its types only.

Modules that need each other are one module cut in two: neither can be read, tested or replaced
without the other.
"""

from __future__ import annotations

import grimp


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return every group of modules in which each imports all others, directly or through others of
    the group.
    """
    imports = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups = set()
    for module, imported in imports.items():
        mutual = {other for other in imported if module in imports[other]}
        if mutual:
            groups.add(frozenset({module, *mutual}))
    return sorted(sorted(group) for group in groups)


def test_no_import_circle() -> None:
    graph = grimp.build_graph("kvflow", exclude_type_checking_imports=False, cache_dir=None)
    assert circles(graph) == []


def test_a_circle_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in ("ab", "bc", "ca", "de", "ed", "af", "gd"):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]
