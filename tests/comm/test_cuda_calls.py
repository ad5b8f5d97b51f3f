"""What is called of torch.cuda and torch.distributed is there in the installed torch, and takes what it is given."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cuda._sanitizer
import torch.distributed as dist
from torch.distributed import distributed_c10d

ROOT = Path(__file__).parents[2]
MODULES = {"torch": torch, "dist": dist, "distributed_c10d": distributed_c10d}
UNTYPED = {"dist.HashStore", "dist.PrefixStore", "dist.TCPStore", "dist.FileStore", "dist.DistStoreError"}
"""What is written in C++ and tells no signature."""


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def is_ours(name: str) -> bool:
    return name.startswith(("torch.cuda.", "torch.accelerator.", "dist.", "distributed_c10d."))


def named(path: Path) -> Iterator[tuple[str, ast.Call | None]]:
    """Names in a file that are of interest, with the call where one is called."""
    tree = ast.parse(path.read_text())
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inside and is_ours(name := dotted(node)):
            yield name, called.get(id(node))


def found(name: str) -> Any:
    first, *rest = name.split(".")
    value: Any = MODULES[first]
    for part in rest:
        value = getattr(value, part)
    return value


def fits(name: str, call: ast.Call) -> None:
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        return
    try:
        signature = inspect.signature(found(name))
    except ValueError:
        assert name in UNTYPED or inspect.isbuiltin(found(name)), name
        return
    signature.bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})


FILES = [
    path
    for folder in ("paceline", "tests/gpu")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if any(word in path.read_text() for word in ("torch.cuda", "torch.accelerator", "dist."))
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_there_and_take_what_they_are_given(path: Path) -> None:
    for name, call in named(path):
        if name.startswith(("dist.distributed", "dist.group.")):
            continue
        found(name)
        if call is not None:
            fits(name, call)


def test_a_wrong_call_is_seen() -> None:
    (call,) = (node for node in ast.walk(ast.parse("torch.cuda.Event(timing=True)")) if isinstance(node, ast.Call))
    with pytest.raises(TypeError):
        fits("torch.cuda.set_device", call)
    with pytest.raises(AttributeError):
        found("torch.cuda.current_streams")
