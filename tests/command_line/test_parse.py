from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from paceline.command_line import options as option_module
from paceline.command_line.options import Value, options
from paceline.command_line.parse import parse, parse_known
from paceline.core.errors import UserError


@dataclass(frozen=True)
class Inner:
    """A section.

    Attributes:
        warm_up: Steps of it,
            or a part of them.
        kind: Which one.
    """

    warm_up: float = 0.5
    kind: Literal["a", "b", 3] = "a"


@dataclass(frozen=True)
class Outer:
    """A command.

    Raises:
        UserError: Never.
    """

    file: Annotated[str, Value("FILE", positional=True)]
    """What is read."""
    count: int | None = 1
    """How many. More of it."""
    names: tuple[str, ...] = ()
    """All names."""
    pair: tuple[float, float] = (1.0, 2.0)
    """Both."""
    loud: bool = False
    """Whether to shout."""
    inner: Inner = field(default_factory=Inner)
    """The section."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Outer("x")),
        (["--count", "-3", "--loud"], Outer("x", count=-3, loud=True)),
        (["--count=7", "--count", "none"], Outer("x", count=None)),
        (["--names", "b", "c", "--names", "d"], Outer("x", names=("d",))),
        (["--names"], Outer("x")),
        (["--pair", "1e-3", "-2", "--loud", "--no-loud"], Outer("x", pair=(1e-3, -2.0))),
        (["--inner.warm_up", "2", "--inner.kind=3"], Outer("x", inner=Inner(2.0, 3))),
    ],
)
def test_arguments_become_values_of_their_types(arguments: list[str], expected: Outer) -> None:
    assert parse(Outer, ["x", *arguments], "try") == expected
    default = Outer("y", count=5, inner=Inner(0.25, "b"))
    assert parse(Outer, arguments[:0], "try", default) == default


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--count", "two"], "--count: expected a whole number or none, got 'two'"),
        (["x", "--count", "9" * 30], "--count: expected a whole number or none, got one of 30 digits"),
        (["x", "--count", "1" * 5000], "--count: expected a whole number or none, got one of 5000 digits"),
        (["x", "--count"], "--count: expected a whole number or none, got nothing"),
        (["x", "--pair", "1"], "--pair: expected a list of 2, each item a number, got 1"),
        (["x", "--inner.kind", "c"], "--inner.kind: expected one of a, b, 3, got 'c'"),
        (["x", "--loud=yes"], "--loud: takes no value, got 'yes'; --no-loud turns it off"),
        (["x", "--cuont", "1"], "there is no option --cuont; did you mean --count?"),
        (["x", "--warmup", "1"], "there is no option --warmup; did you mean --inner.warm-up?"),
        (["x", "y"], "'y' follows no option that takes it"),
        (["x", "-v"], "there is no option -v"),
        ([], "try: FILE is missing: What is read (`try --help` has more)"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(Outer, arguments, "try")
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_what_is_not_known_is_given_back_in_order() -> None:
    parsed, rest = parse_known(Inner, ["run.yaml", "--other", "1", "--kind", "b", "--more=2"], "try")
    assert parsed == Inner(kind="b")
    assert rest == ["run.yaml", "--other", "1", "--more=2"]


def test_texts_come_from_below_the_fields_or_from_the_docstring() -> None:
    texts = {option.flag: option.text for option in options(Outer)}
    assert texts["--count"] == "How many. More of it."
    assert texts["--inner.warm-up"] == "Steps of it, or a part of them."


def test_texts_are_read_only_where_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: type) -> dict[str, str]:
        raise AssertionError

    monkeypatch.setattr(option_module, "field_texts", read)
    assert parse(Outer, ["x", "--count", "2", "--inner.kind", "b"], "try") == Outer("x", 2, inner=Inner(kind="b"))
    with pytest.raises(UserError, match="there is no option"):
        parse(Outer, ["x", "--cuont", "1"], "try")


def test_help_says_all_without_python_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as caught:
        parse(Outer, ["--help"], "try")
    assert caught.value.code == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: try FILE [options]\n\nA command.\n\noptions:\n")
    assert "\n  --count N" in page and "How many. More of it. [1]\n" in page
    assert "\n  --pair NUMBER NUMBER" in page and "\n  --names TEXT ..." in page and "\n  --loud " in page
    assert "\ninner:\n" in page and "--inner.kind a|b|3" in page and "[0.5]" in page
    assert max(map(len, page.splitlines())) <= 60
    assert not any(word in page for word in ("None", "Literal", "Raises", "_", "MISSING"))
