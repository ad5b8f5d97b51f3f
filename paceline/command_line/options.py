"""A frozen dataclass's fields as options of a command: names, types in words, texts."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_ATTRIBUTES = re.compile(r"^Attributes:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^    (\w+): (.*?)(?=^    \w|\Z)", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Value:
    """What help calls an option's value: `Annotated[str, Value("FILE")]`."""

    name: str
    positional: bool = False
    """Given without a flag, as the first argument."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option."""

    path: tuple[str, ...]
    """Names of the fields that lead to it."""
    hint: Any
    """The value's type."""
    default: Any
    """Its value where none is given; `dataclasses.MISSING` if one must be."""
    owner: type
    """The dataclass of which it is a field."""
    value: Value | None = None
    """How help calls its value, if not by the type."""
    in_short: str | None = None
    """What it is for, where that is not to be what is written about the field."""

    @property
    def text(self) -> str:
        """What it is for, one paragraph: read from the source when it is asked for, as that takes longest."""
        return field_texts(self.owner).get(self.path[-1], "") if self.in_short is None else self.in_short

    @property
    def flag(self) -> str:
        """The option's flag, such as --optim.final-lr-fraction."""
        return "--" + ".".join(self.path).replace("_", "-")

    @property
    def off(self) -> str:
        """What turns a flag off, such as --log.no-wandb."""
        return "--" + ".".join((*self.path[:-1], f"no-{self.path[-1]}")).replace("_", "-")

    @property
    def positional(self) -> bool:
        """Whether it is given without a flag."""
        return self.value is not None and self.value.positional

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off and takes no value."""
        return self.hint is bool

    @property
    def is_list(self) -> bool:
        """Whether it takes any number of values."""
        return get_args(self.hint)[-1:] == (Ellipsis,)

    @property
    def choices(self) -> tuple[str, ...]:
        """All values there are; empty if there are too many to name."""
        found = [kind for kind in kinds(self.hint) if get_origin(kind) is Literal]
        return tuple(str(choice) for kind in found for choice in get_args(kind))


def options(cls: type, default: Any = None, path: tuple[str, ...] = ()) -> Iterator[Option]:
    """The options that a dataclass describes, those of its nested dataclasses last.

    Args:
        cls: A dataclass whose fields have texts: a string below each, or in its docstring under `Attributes:`.
        default: An instance whose values are the defaults; None for the fields' own.
        path: Names of the fields that lead to it.
    """
    hints = get_type_hints(cls, include_extras=True)
    sections: list[tuple[str, Any]] = []
    for field in dataclasses.fields(cls):
        hint, *marks = _annotations(hints[field.name])
        value = getattr(default, field.name) if default is not None else field_default(field)
        if dataclasses.is_dataclass(hint):
            sections.append((field.name, value))
        else:
            mark = next((each for each in marks if isinstance(each, Value)), None)
            yield Option((*path, field.name), hint, value, cls, mark)
    for name, value in sections:
        yield from options(type(value), value, (*path, name))


def kinds(hint: Any) -> list[Any]:
    """The types that values may have, but for None: of a list its items', of a union its members'."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for item in get_args(hint) if item is not type(None) for kind in kinds(item)]
    if get_origin(hint) is tuple:
        return kinds(get_args(hint)[0])
    return [hint]


def words(hint: Any, none: str = "none") -> str:
    """A type in words.

    Args:
        hint: int, float, str, bool, a Literal, None, or tuples and unions of them.
        none: What None is called.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(none if item is type(None) else words(item) for item in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        length = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        return f"a list{length}, each item {words(arguments[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(hint, str(hint))


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """What is written about each field of a dataclass, also of those that it inherits."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        for section in _ATTRIBUTES.findall(inspect.cleandoc(each.__doc__ or "")):
            texts |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for statement, following in pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(ast.Constant(str(text))):
                        texts[statement.target.id] = " ".join(text.split())
    return texts


def _annotations(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) is Annotated else [hint]


def field_default(field: dataclasses.Field[Any]) -> Any:
    """A field's own default; `dataclasses.MISSING` if it has none."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
