"""Arguments become an instance of a frozen dataclass; a mistake is one line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from paceline.command_line.help_page import help_page
from paceline.command_line.options import Option, field_default, kinds, options, words
from paceline.core.errors import UserError

Parsed = TypeVar("Parsed")


def parse(
    cls: type[Parsed],
    arguments: Sequence[str],
    command: str,
    default: Parsed | None = None,
) -> Parsed:
    """What the arguments of a command describe.

    Args:
        cls: A frozen dataclass, which may hold others as sections.
        arguments: `--section.some-field VALUE` or `--section.some-field=VALUE`; underscores are hyphens.
        command: Its name, such as "paceline plan", for help.
        default: Values of what is not given; None for the fields' own.

    Raises:
        UserError: A flag is unknown, or its value not of the type that it should be.
        SystemExit: --help, which is printed (status 0).
    """
    parsed, rest = parse_known(cls, arguments, command, default)
    if rest:
        raise _unknown(rest[0], list(options(cls, default)))
    return parsed


def parse_known(
    cls: type[Parsed], arguments: Sequence[str], command: str, default: Parsed | None = None, usage: str = ""
) -> tuple[Parsed, list[str]]:
    """As `parse`, and gives back the arguments that it does not know, with what follows them.

    `usage` is what help's first line says after the command.
    """
    known = list(options(cls, default))
    if "--help" in arguments or "-h" in arguments:
        print(help_page(command, cls.__doc__ or "", known, usage), end="")
        raise SystemExit(0)
    values, rest = _values(known, arguments)
    for option in known:
        if option.default is dataclasses.MISSING and option.path not in values:
            name = option.value.name if option.positional and option.value else option.flag
            raise UserError(f"{command}: {name} is missing: {option.text.rstrip('.')} (`{command} --help` has more)")
    return _build(cls, default, values, ()), rest


def _values(known: Sequence[Option], arguments: Sequence[str]) -> tuple[dict[tuple[str, ...], Any], list[str]]:
    flags = {option.flag: option for option in known if not option.positional}
    offs = {option.off: option for option in known if option.is_switch}
    positional = [option for option in known if option.positional]
    values: dict[tuple[str, ...], Any] = {}
    rest: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, text = argument.partition("=")
        name = name.replace("_", "-")
        option = flags.get(name) or offs.get(name)
        if option is not None and option.is_switch and not equals:
            values[option.path] = name in flags
        elif option is not None:
            given = [text] if equals else []
            while not equals and left and _is_value(left[0]) and len(given) < _most(option):
                given.append(left.pop(0))
            values[option.path] = _convert(option, given)
        elif positional and _is_value(argument) and not rest:
            option = positional.pop(0)
            values[option.path] = _convert(option, [argument])
        else:
            rest.append(argument)
    return values, rest


def _is_value(argument: str) -> bool:
    """Whether it is no flag: negative numbers begin with one hyphen."""
    return not argument.startswith("--")


def _most(option: Option) -> int:
    """How many values follow the flag at most."""
    if get_origin(option.hint) is tuple:
        return 1_000_000 if option.is_list else len(get_args(option.hint))
    return 1


def _convert(option: Option, given: list[str]) -> Any:
    several = get_origin(option.hint) is tuple
    expected = words(option.hint)
    name = option.value.name if option.positional and option.value else option.flag
    if option.is_switch:
        raise UserError(f"{name}: takes no value, got {given[0]!r}; {option.off} turns it off")
    if len(given) != _most(option) and not option.is_list:
        got = " ".join(given) if given else "nothing"
        raise UserError(f"{name}: expected {expected}, got {got}")
    if not several and given[0].lower() == "none" and type(None) in get_args(option.hint):
        return None
    try:
        converted = tuple(_item(kinds(option.hint), text) for text in given)
    except ValueError as error:
        raise UserError(f"{name}: expected {expected}, got {error}") from None
    return converted if several else converted[0]


def _item(allowed: Sequence[Any], text: str) -> Any:
    """The text as the first type that it is a value of; a ValueError says what came instead."""
    for kind in allowed:
        if get_origin(kind) is Literal:
            for choice in get_args(kind):
                if text == str(choice):
                    return choice
            continue
        try:
            value = kind(text)
        except ValueError:
            continue
        if not isinstance(value, int) or value.bit_length() < 64:
            return value
    if text.lstrip("-").isdecimal():
        raise ValueError(f"one of {len(text.lstrip('-'))} digits")
    raise ValueError(repr(text if len(text) < 60 else f"{text[:56]}..."))


def _build(cls: type, default: Any, values: dict[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        here = (*path, field.name)
        if here in values:
            changes[field.name] = values[here]
        elif any(key[: len(here)] == here for key in values):
            section = field_default(field) if default is None else getattr(default, field.name)
            changes[field.name] = _build(type(section), section, values, here)
    return dataclasses.replace(default, **changes) if default is not None else cls(**changes)


def _unknown(argument: str, known: Sequence[Option]) -> UserError:
    name = argument.partition("=")[0]
    if _is_value(name) and not name.startswith("-"):
        return UserError(f"{argument!r} follows no option that takes it; flags begin with --")
    flags = [option.flag for option in known if not option.positional]
    wanted = name.replace("_", "-").lower()
    last = {flag.rpartition(".")[2].lstrip("-"): flag for flag in flags}
    alone = [last[match] for match in difflib.get_close_matches(wanted.lstrip("-"), last, n=1)]
    near = alone if "." not in wanted and alone else difflib.get_close_matches(wanted, flags, n=1) or alone
    return UserError(f"there is no option {name}; {f'did you mean {near[0]}?' if near else '--help shows them'}")
