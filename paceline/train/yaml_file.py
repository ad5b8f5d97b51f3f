"""Configuration files: YAML onto frozen dataclasses, with the line of every mistake."""

from __future__ import annotations

import dataclasses
import difflib
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from paceline.errors import UserError
from paceline.train.config import TrainConfig

Section = TypeVar("Section")


def read_yaml(path: str) -> yaml.MappingNode | None:
    """The file as nodes that know their lines; None if it is empty.

    Raises:
        UserError: The file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"configuration file {path}: cannot be read: {reason}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if node is None:
        return None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{_line(node)}: expected `key: value` lines, got {node.value!r}")
    return node


def preset_in(node: yaml.MappingNode | None) -> str | None:
    """The model preset that the file names, if it does."""
    for key, value in node.value if node is not None else ():
        if key.value == "model" and isinstance(value, yaml.MappingNode):
            for name, choice in value.value:
                if name.value == "preset":
                    return str(choice.value)
    return None


def overlay(config: Section, node: yaml.MappingNode, path: str, prefix: str = "", skip: str = "") -> Section:
    """`config` with the values of the file in place of its own.

    Args:
        config: A dataclass instance, nested for sections.
        node: The part of the file that belongs to it.
        path: The file's name, for messages.
        prefix: Dotted name of the section with a dot at its end, for messages.
        skip: A top-level section of the file to leave out.

    Raises:
        UserError: A key is unknown or given twice, or a value has the wrong type or range.
    """
    hints = get_type_hints(type(config))
    names = [item.name for item in dataclasses.fields(config)]  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, where = str(key_node.value), f"{path}:{_line(key_node)}"
        if key not in names:
            raise UserError(f"{where}: unknown key {prefix}{key}{_nearest(key, prefix, names)}")
        if key in changes:
            raise UserError(f"{where}: {prefix}{key} is given twice; keep one")
        if not prefix and key == skip:
            continue
        current = getattr(config, key)
        if not dataclasses.is_dataclass(current):
            changes[key] = _convert(value_node, hints[key], f"{where}: {prefix}{key}")
        elif isinstance(value_node, yaml.MappingNode):
            changes[key] = overlay(current, value_node, path, f"{prefix}{key}.")
        elif _plain(value_node) is not None:
            raise UserError(f"{where}: {prefix}{key} is a section: expected `key: value` lines below it")
    try:
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
    except UserError as error:
        raise UserError(f"{path}:{_line(node)}: {error}") from None


def to_yaml(config: TrainConfig) -> str:
    """The configuration as YAML that `overlay` reads back to the same values."""
    values = config.to_dict()
    for unicode in (True, False):
        text: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, allow_unicode=unicode)
        # Rare characters, such as U+0085, survive only as escapes.
        if yaml.safe_load(text) == values:
            break
    return text


def _nearest(key: str, prefix: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    return f"; known here: {', '.join(prefix + name for name in names)}"


def _convert(node: yaml.Node, hint: Any, what: str) -> Any:
    value = _plain(node)
    try:
        return _typed(value, hint)
    except ValueError:
        raise UserError(f"{what}: expected {_words(hint)}, got {value!r}") from None


def _typed(value: Any, hint: Any) -> Any:
    """`value` as the type that `hint` asks for; ValueError if it is another."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _typed(value, next(item for item in arguments if item is not type(None)))
    if origin is Literal:
        if value not in arguments:
            raise ValueError
        return value
    if origin is tuple:
        # One value may stand for a list of one, as in `path: notes.txt`.
        items = value if isinstance(value, list) else [value]
        inner = [arguments[0]] * len(items) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(_typed(item, kind) for item, kind in zip(items, inner, strict=True))
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML 1.1 reads 3e-4 as text, because it has no dot.
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError
    return value


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if item is type(None) else _words(item) for item in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each item {_words(arguments[0])}"
        return f"a list of {len(arguments)}, each item {_words(arguments[0])}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(hint, str(hint))


def _plain(node: yaml.Node) -> Any:
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node, deep=True)
    except yaml.YAMLError:
        return node.value
    finally:
        constructor.dispose()


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
