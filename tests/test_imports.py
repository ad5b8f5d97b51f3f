"""Which module knows which, and how long one may be."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, also inside functions and for type checkers alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {
        ".".join(("paceline", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: imported(path) & modules.keys() for name, path in modules.items()}
    assert len(graph["paceline.comm.cpu.transport"]) > 5
    # Raises, and names the circle, if there is one.
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) == len(modules)


def test_ops_are_made_by_the_schedule_alone() -> None:
    """What runs, also what only data asks for, is made by the builder of schedules, and so can be read there."""

    def makes_ops(path: Path) -> bool:
        text = path.read_text()
        if "Op(" not in text:
            return False
        calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        return any(isinstance(func, ast.Name) and func.id == "Op" for func in calls)

    made_in = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if makes_ops(path)}
    # How long one takes is measured with one of its own.
    assert made_in - {"bench/events.py"} == {"core/schedule.py", "core/transfers.py"}


def test_files_are_of_one_idea_and_so_no_longer_than_300_lines() -> None:
    files = [path for root in (ROOT, Path(__file__).parent) for path in root.rglob("*.py")]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 900
    assert {path.as_posix(): lines for path, lines in lengths.items() if lines > 300} == {}
