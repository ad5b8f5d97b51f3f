"""Configuration files: YAML onto frozen dataclasses, with the line of every mistake."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import yaml

from paceline.command_line.options import words
from paceline.core.errors import UserError
from paceline.train.config import TrainConfig

Section = TypeVar("Section")

# YAML 1.1, which PyYAML reads, takes 3e-4 for text: it has no dot. YAML 1.2 takes it for a number.
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60

_MOST = 1_000_000
"""Characters of a file."""


@dataclasses.dataclass(frozen=True)
class _NoValue:
    """What stands in the file and is the value of no setting: a mapping, a date, a number of too many digits."""

    text: str

    def __repr__(self) -> str:
        return self.text


def read_yaml(path: str) -> yaml.MappingNode | None:
    """The file as nodes that know their lines; None if it is empty.

    Raises:
        UserError: The file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MOST + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"configuration file {path}: cannot be read: {reason}") from None
    try:
        if len(text) > _MOST:
            raise UserError(f"{path}: longer than {_MOST:,} characters: it is no configuration")
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply: a configuration has sections and their settings") from None
    if node is None:
        return None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{_line(node)}: expected `key: value` lines, got {_SHORT.repr(_value(node))}")
    return node


def preset_in(node: yaml.MappingNode | None) -> str | None:
    """The model preset that the file names, if it does."""
    for key, value in node.value if node is not None else ():
        if key.value == "model" and isinstance(value, yaml.MappingNode):
            for name, choice in value.value:
                if name.value == "preset" and isinstance(choice, yaml.ScalarNode):
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
        key, where = _key(key_node), f"{path}:{_line(key_node)}"
        if key not in names:
            raise UserError(f"{where}: unknown key {prefix}{key}{_nearest(key, prefix, names)}")
        if key in changes:
            raise UserError(f"{where}: {prefix}{key} is given twice; keep one")
        if not prefix and key == skip:
            continue
        current = getattr(config, key)
        if not dataclasses.is_dataclass(current):
            changes[key] = _convert(_value(value_node), hints[key], f"{where}: {prefix}{key}")
        elif isinstance(value_node, yaml.MappingNode):
            changes[key] = overlay(current, value_node, path, f"{prefix}{key}.")
        elif _value(value_node) is not None:
            raise UserError(f"{where}: {prefix}{key} is a section: expected `key: value` lines below it")
    try:
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
    except UserError as error:
        raise UserError(f"{path}:{_line(node)}: {error}") from None


def to_yaml(config: TrainConfig) -> str:
    """The configuration as YAML that `overlay` reads back to the same values."""
    values = config.to_dict()
    for unicode in (True, False):
        text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=unicode)
        # Rare characters, such as U+0085, survive only as escapes.
        if yaml.load(text, Loader=_Loader) == values:
            break
    return text


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return repr(_value(node))
    key = str(node.value)
    return key if key.isprintable() and len(key) < 60 else _SHORT.repr(key)


def _nearest(key: str, prefix: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    return f"; known here: {', '.join(prefix + name for name in names)}"


def _convert(value: Any, hint: Any, what: str) -> Any:
    """`value` as the type that `hint` asks for."""
    # One value may stand for a list of one, as in `path: notes.txt`.
    alone = get_args(hint)[-1:] == (Ellipsis,) and not isinstance(value, list)
    try:
        return msgspec.convert([value] if alone else value, hint)
    except msgspec.ValidationError:
        raise UserError(f"{what}: expected {words(hint, none='null')}, got {_SHORT.repr(value)}") from None


def _value(node: yaml.Node) -> Any:
    """A scalar, or a list of scalars, which is all that settings are; anything else as what cannot be a value.

    Does not go deeper, so that aliases of aliases cost nothing.
    """
    if isinstance(node, yaml.SequenceNode):
        return [_NoValue("a list") if isinstance(item, yaml.SequenceNode) else _value(item) for item in node.value]
    if not isinstance(node, yaml.ScalarNode):
        return _NoValue("a mapping")
    text = str(node.value)
    constructor = _Loader("")
    try:
        value = constructor.construct_object(node)
    except (yaml.YAMLError, ValueError):
        return _NoValue(text)
    finally:
        constructor.dispose()
    if isinstance(value, str):
        return value if _can_be_a_name(value) else _NoValue(ascii(value))
    fits = value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() < 64)
    return value if fits else _NoValue(text)


def _can_be_a_name(text: str) -> bool:
    """Whether a file may be called so, which is what most texts are for."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
