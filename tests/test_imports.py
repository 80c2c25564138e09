"""The house has no circle, of files or of folders: imports run downwards only, lazy and type-checking ones included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = {"dreamgym_lg": "dreamgym_lg", "graphs": "dreamgym_lg.graphs", "integrations": "dreamgym_lg.integrations"}


def modules() -> dict[str, Path]:
    """Every shipped module by its dotted name; a package is its `__init__`."""
    found = {}
    for folder, package in SHIPPED.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = file
    return found


def imported(file: Path, known: dict[str, Path]) -> set[str]:
    """The shipped modules that a file names in any import statement, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in known else node.module)
    return names & known.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import circle, in order; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for each in sorted(graph[name]):
            if found := visit(each, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_no_import_circle() -> None:
    known = modules()
    assert len(known) > 80
    assert not circle({name: imported(file, known) - {name} for name, file in known.items()})


def test_no_circle_of_folders() -> None:
    known = modules()
    between: dict[str, set[str]] = {}
    for name, file in known.items():
        between.setdefault(folder(name), set()).update({folder(other) for other in imported(file, known)} - {folder(name)})
    assert not circle(between)


def folder(module: str) -> str:
    """A room of the house: `dreamgym_lg.replay`, `dreamgym_lg.integrations.trl`; of modules at the top, each its own."""
    return ".".join(module.split(".")[: 3 if module.startswith("dreamgym_lg.integrations.") else 2])


@pytest.mark.parametrize(
    "graph, expected",
    [
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
    ],
)
def test_a_circle_is_found(graph: dict[str, set[str]], expected: list[str]) -> None:
    assert circle(graph) == expected
