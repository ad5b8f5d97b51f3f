"""Configuration files that nobody writes by mistake: each ends in one line, and none takes time or memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli import main
from paceline.core.errors import UserError
from paceline.train.config import TrainConfig
from paceline.train.yaml_file import overlay, preset_in, read_yaml

BOMB = "steps: &l0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"l{depth}: &l{depth} [{', '.join([f'*l{depth - 1}'] * 9)}]\n" for depth in range(1, 12)
)


def read(path: Path, text: str) -> TrainConfig:
    path.write_text(text, encoding="utf-8")
    node = read_yaml(str(path))
    preset_in(node)
    return TrainConfig() if node is None else overlay(TrainConfig(), node, str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "steps: expected a whole number"),
        (BOMB.replace("steps", "folder"), "folder: expected text or null"),
        ("steps: " + "9" * 5000, "steps: expected a whole number"),
        ("optim: {lr: .inf}", "optim.lr: expected"),
        ("steps: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("data: &a {path: [*a]}", "data.path: expected"),
        ('folder: "a\\0b"', "folder: expected text or null, got 'a\\\\x00b'"),
        ('data: {path: "\\uD800"}', "data.path: expected"),
        ("#" * 2_000_000, "longer than 1,000,000 characters"),
        ('"\\e]0;owned\\a": 1', "unknown key '\\\\x1b"),
    ],
)
def test_each_ends_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path / "run.yaml", text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_a_name_that_a_terminal_would_obey_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "\x1b]0;owned\x07\x1b[31m.yaml"
    path.write_text("steps: many")
    assert main(["train", str(path)]) == 2
    told = capsys.readouterr().err
    assert "\x1b" not in told and "\\x1b[31m.yaml:1: steps: expected a whole number" in told


SCALARS = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
    st.sampled_from(
        ["*a", "&a 1", "!!int x", "!!binary AA", "!!python/name:os.system", "<<", "~", "1:2:3", "2020-13-45"]
    ),
)
NODES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]"),
        st.dictionaries(st.one_of(inner, st.sampled_from(["path", "lr", "preset"])), inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["steps", "optim", "data", "model", "strategy", "log", "folder", "timeout", "<<", "? [a]"])


@given(st.lists(st.tuples(KEYS, NODES), max_size=3))
def test_anything_is_a_configuration_or_a_users_mistake(tmp_path_factory: pytest.TempPathFactory, lines) -> None:  # type: ignore[no-untyped-def]
    text = "".join(f"{key}: {value}\n" for key, value in lines)
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    try:
        read(tmp_path_factory.getbasetemp() / "drawn.yaml", text)
    except UserError as error:
        assert len(str(error)) < 1500
