"""What a command's options are, on a page as wide as the terminal."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, get_args, get_origin

from paceline.command_line.options import Option, kinds

WIDEST = 110
MOST_FLAG_COLUMNS = 40
LONGEST_CHOICES = 28
_SECTION = re.compile(r"^(?:Attributes|Raises|Example):$", re.MULTILINE)
_VALUES = {int: "N", float: "NUMBER", str: "TEXT"}


def help_page(command: str, text: str, known: Sequence[Option], usage: str = "") -> str:
    """The page of a command.

    Args:
        command: Its name.
        text: What it does: a docstring.
        known: Its options.
        usage: What follows the command in the first line; by default the arguments without a flag and [options].
    """
    text = _SECTION.split(inspect.cleandoc(text))[0].strip()
    # Indented paragraphs are examples.
    paragraphs = [part if part.startswith(" ") else fill(part) for part in text.split("\n\n")]
    needed = [_flag(option) for option in known if option.positional or option.default is dataclasses.MISSING]
    usage = usage or " ".join([*needed, "[options]"])
    return "\n\n".join([f"usage: {command} {usage}", *paragraphs, option_list(known)])


def fill(text: str, indent: str = "") -> str:
    """One paragraph, as wide as the page; its second line and others begin with `indent`."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def option_list(known: Sequence[Option], *, full: bool = True) -> str:
    """Options, a paragraph each.

    Args:
        known: The options.
        full: Whether to write the sections' names above them, and list choices.
    """
    longest = max(len(_flag(option)) for option in known)
    width = min(WIDEST, shutil.get_terminal_size().columns)
    column = min(MOST_FLAG_COLUMNS, longest + 4, width // 2)
    lines: list[str] = []
    section: tuple[str, ...] | None = None
    for option in known:
        if full and option.path[:-1] != section:
            section = option.path[:-1]
            lines += [*([""] if lines else []), f"{'.'.join(section) or 'options'}:"]
        text = textwrap.wrap(
            _text(option, full), max(30, width - column), break_long_words=False, break_on_hyphens=False
        )
        flag = f"  {_flag(option)}"
        if len(flag) + 2 > column:
            lines.append(flag)
            flag = ""
        lines += [f"{head:<{column}}{line}".rstrip() for head, line in zip_longest([flag], text, fillvalue="")]
    return "\n".join(lines) + "\n"


def value_name(option: Option) -> str:
    """What stands for an option's value: FILE, N, on|off."""
    if option.value is not None:
        name = option.value.name
    else:
        name = "|".join(option.choices)
        if not name or len(name) > LONGEST_CHOICES:
            name = "CHOICE" if name else _VALUES.get(kinds(option.hint)[0], "VALUE")
    if option.is_list:
        return f"{name} ..."
    return " ".join([name] * (len(get_args(option.hint)) if get_origin(option.hint) is tuple else 1))


def _flag(option: Option) -> str:
    if option.positional:
        return value_name(option)
    if option.is_switch:
        return option.off if option.default is True else option.flag
    return f"{option.flag} {value_name(option)}"


def _text(option: Option, full: bool) -> str:
    text = option.text
    if option.is_switch:
        return f"On without this flag: {text[:1].lower()}{text[1:]}" if option.default is True else text
    if full and value_name(option).startswith("CHOICE") and not all(choice in text for choice in option.choices):
        text += f" One of {', '.join(option.choices)}."
    default = _shown(option.default)
    return f"{text} [{default}]" if default else text


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING or default is None or default == "" or default == ():
        return ""
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
