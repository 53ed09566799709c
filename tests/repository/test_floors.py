"""Imports form floors: a room is a module at the root of a package, or a folder there, and imports lower rooms only.

    sources --ast--> import of a module of the same package, by file and line --> rooms --> circles, floors

Imports inside functions and under `TYPE_CHECKING` count too: what knows of something depends on it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("aot_hooks", "cudagraph")
MOST_FLOORS = 11
MOST_FILES_AT_THE_ROOT = 16

Graph = dict[str, set[str]]  # from an importer to what it imports


class Import(NamedTuple):
    """`importer`, a module, imports `imported`, another module of the same package."""

    importer: str
    imported: str
    where: str  # file:line

    def __str__(self) -> str:
        return f"  {self.where}: {self.importer} imports {self.imported}"


def sources_of(package: str) -> dict[str, str]:
    """The sources by their paths below the root."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / package).rglob("*.py")
    }


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def names_imported(path: str, source: str) -> Iterator[tuple[str, int]]:
    """Absolute dotted names, with their lines."""
    folders = path.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((item.name, node.lineno) for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = folders[: len(folders) - node.level + 1] if node.level else []
            parts = [*start, *(node.module.split(".") if node.module else [])]
            yield from ((".".join([*parts, item.name]), node.lineno) for item in node.names)


def imports_of(sources: Mapping[str, str]) -> list[Import]:
    """Of modules of one package among each other. What a name of the package itself stands for is not followed."""
    modules = {module_of(path): path for path in sources}
    found = []
    for path, source in sorted(sources.items()):
        for name, line in names_imported(path, source):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if "." in name and name != module_of(path):
                found.append(Import(module_of(path), name, f"{path}:{line}"))
    return found


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def graph_of(edges: Iterable[tuple[str, str]]) -> Graph:
    graph: Graph = {}
    for importer, imported in edges:
        graph.setdefault(importer, set()).add(imported)
        graph.setdefault(imported, set())
    return graph


def reached_from(graph: Graph, start: str) -> set[str]:
    """All that `start` imports, and what that imports, and so on."""
    found: set[str] = set()
    left = list(graph[start])
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += graph[each]
    return found


def in_circles(graph: Graph) -> set[tuple[str, str]]:
    """The edges whose end leads back to their start."""
    reached = {node: reached_from(graph, node) for node in graph}
    return {(a, b) for a, targets in graph.items() for b in targets if a == b or a in reached[b]}


def floors_of(graph: Graph) -> dict[str, int]:
    """1 for what imports nothing, else one more than the highest that is imported; of a graph without circles."""
    floors: dict[str, int] = {}

    def floor(node: str) -> int:
        if node not in floors:
            floors[node] = 1 + max(map(floor, graph[node]), default=0)
        return floors[node]

    for node in graph:
        floor(node)
    return floors


def rooms(imports: Iterable[Import]) -> Graph:
    """Of `package.__main__` and the like too, but not of the package's `__init__`, which is the top."""
    pairs = ((room_of(i.importer), room_of(i.imported)) for i in imports if "." in i.importer)
    return graph_of((a, b) for a, b in pairs if a != b)


def imports_in_circles(imports: list[Import]) -> list[Import]:
    """Between rooms, and between modules of one room."""
    between = in_circles(rooms(imports))
    within = in_circles(
        graph_of((i.importer, i.imported) for i in imports if room_of(i.importer) == room_of(i.imported))
    )
    return [
        i
        for i in imports
        if (room_of(i.importer), room_of(i.imported)) in between or (i.importer, i.imported) in within
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_up_or_in_a_circle(package: str) -> None:
    wrong = dict.fromkeys(map(str, imports_in_circles(imports_of(sources_of(package)))))
    assert not wrong, "the lower module of a circle must not import the upper one:\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_there_are_few_floors(package: str) -> None:
    graph = rooms(imports_of(sources_of(package)))
    circles = in_circles(graph)
    floors = floors_of({a: {b for b in targets if (a, b) not in circles} for a, targets in graph.items()})
    by_floor = "\n".join(f"  {number} {room}" for room, number in sorted(floors.items(), key=lambda item: item[1]))
    assert max(floors.values()) <= MOST_FLOORS, f"expected at most {MOST_FLOORS} floors, got\n{by_floor}"


def test_aot_hooks_has_few_files_at_its_root() -> None:
    files = sorted(path.name for path in (ROOT / "aot_hooks").glob("*.py"))
    assert len(files) <= MOST_FILES_AT_THE_ROOT, f"{len(files)} files: {', '.join(files)}; put some into a folder"


@pytest.mark.parametrize("package", PACKAGES)
def test_each_folder_says_in_a_paragraph_what_it_is_for(package: str) -> None:
    texts = {path: source for path, source in sources_of(package).items() if path.endswith("/__init__.py")}
    assert [path for path, source in texts.items() if not ast.get_docstring(ast.parse(source))] == []


def test_cudagraph_imports_nothing_of_aot_hooks() -> None:
    sources = sources_of("cudagraph")
    names = [(path, name) for path, source in sources.items() for name, _ in names_imported(path, source)]
    assert [(path, name) for path, name in names if name.split(".")[0] == "aot_hooks"] == []


# --- the check itself -------------------------------------------------------------------------------------------------

HOUSE = {
    "p/__init__.py": "from .top import run",
    "p/low.py": "import torch",
    "p/room/__init__.py": '"""A room."""',
    "p/room/a.py": "from ..low import x",
    "p/room/b.py": "from . import a\nfrom .a import y",
    "p/top.py": "from .room import b\nimport p.low",
}


def test_a_house_with_floors_passes() -> None:
    imports = imports_of(HOUSE)
    assert [(i.importer, i.imported, i.where) for i in imports if i.importer != "p"] == [
        ("p.room.a", "p.low", "p/room/a.py:1"),
        ("p.room.b", "p.room.a", "p/room/b.py:1"),
        ("p.room.b", "p.room.a", "p/room/b.py:2"),
        ("p.top", "p.room.b", "p/top.py:1"),
        ("p.top", "p.low", "p/top.py:2"),
    ]
    assert imports_in_circles(imports) == []
    assert floors_of(rooms(imports)) == {"p.low": 1, "p.room": 2, "p.top": 3}
