from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import UserError
from paceline.models.presets import PRESETS
from paceline.strategy import Strategy
from paceline.train.command_line import parse_train_arguments
from paceline.train.config import LogConfig, OptimConfig, TrainConfig
from paceline.train.defaults import defaults
from paceline.train.yaml_file import overlay, read_yaml, to_yaml


def from_file(tmp_path: Path, text: str, *flags: str) -> TrainConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return parse_train_arguments([str(path), *flags])


def message(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        from_file(tmp_path, text)
    return str(caught.value)


def test_without_arguments_it_is_the_tiny_preset() -> None:
    config = parse_train_arguments([])
    assert config == defaults("tiny")
    assert config.model.shape(2048) == PRESETS["tiny"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_settings_and_keeps_its_shape(name: str) -> None:
    config = defaults(name)
    assert config.model.shape(PRESETS[name].vocabulary) == PRESETS[name]
    assert config.data.vocabulary == PRESETS[name].vocabulary


def test_flags_override_the_file_which_overrides_the_preset(tmp_path: Path) -> None:
    text = "model:\n  preset: small\noptim:\n  lr: 1e-3\n  eps: 1e-7\nsteps: 7\n"
    config = from_file(tmp_path, text, "--optim.lr", "3e-4", "--workers", "2", "--model.no-tied")
    small = defaults("small")
    assert config == replace(
        small,
        model=replace(small.model, tied=False),
        optim=replace(small.optim, lr=3e-4, eps=1e-7),
        steps=7,
        workers=2,
    )


def test_a_preset_given_as_a_flag_replaces_the_files_model(tmp_path: Path) -> None:
    text = "model: {preset: small, width: 512}\nsteps: 5\n"
    config = from_file(tmp_path, text, "--model.preset", "nano")
    assert config.model == defaults("nano").model
    assert config.steps == 5
    assert from_file(tmp_path, text, "--model.preset=small").model.width == 512


def test_the_file_may_stand_anywhere(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text("steps: 5\n")
    assert parse_train_arguments(["--seed", "3", str(tmp_path / "run.yml"), "--batch", "4"]).steps == 5
    with pytest.raises(UserError, match="one configuration file"):
        parse_train_arguments([str(tmp_path / "run.yml"), "--seed", "3", "other.yaml"])


def test_a_path_may_be_one_text_or_a_list(tmp_path: Path) -> None:
    assert from_file(tmp_path, "data: {path: notes.txt}").data.path == ("notes.txt",)
    assert from_file(tmp_path, "data: {path: [a.txt, b/]}").data.path == ("a.txt", "b/")


def test_an_empty_file_or_section_changes_nothing(tmp_path: Path) -> None:
    assert from_file(tmp_path, "") == defaults("tiny")
    assert from_file(tmp_path, "optim:\ndata:\n") == defaults("tiny")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("steps: 5\noptim:\n  lrr: 1\n", 3, ["unknown key optim.lrr", "did you mean optim.lr?"]),
        ("setps: 5\n", 1, ["unknown key setps", "did you mean steps?"]),
        ("model:\n  kv-heads: 2\n", 2, ["did you mean model.kv_heads?"]),
        ("\n\nzzzzzz: 5\n", 3, ["known here: model, data, optim"]),
        ("steps: many\n", 1, ["steps: expected a whole number, got 'many'"]),
        ("steps: 5.5\n", 1, ["expected a whole number, got 5.5"]),
        ("steps: true\n", 1, ["expected a whole number, got True"]),
        ("optim:\n  betas: [0.9]\n", 2, ["optim.betas: expected a list of 2, each item a number"]),
        ("optim:\n  schedule: step\n", 2, ["one of cosine, linear, constant, got 'step'"]),
        ("log:\n  tensorboard: 1\n", 2, ["log.tensorboard: expected true or false, got 1"]),
        ("data:\n  path: [1]\n", 2, ["data.path: expected a list, each item text"]),
        ("folder: 2026-01-01\n", 1, ["folder: expected text or null"]),
        ("optim: fast\n", 1, ["optim is a section"]),
        ("steps: 1\nsteps: 2\n", 2, ["steps is given twice"]),
        ("steps: [1\nseed: 2\n", 2, ["not valid YAML"]),
        ("- steps\n", 1, ["expected `key: value` lines"]),
        ("seed: 1\nmodel:\n  width: 100\n  heads: 3\n", 3, ["width must be a multiple of heads"]),
        ("seed: 1\noptim:\n  lr: -1\n", 3, ["optim.lr: expected a number above 0, got -1.0"]),
        ("batch: 2\nworkers: 3\n", 1, ["2 samples cannot be shared by 3 ranks"]),
        ("strategy:\n  packing: bags\n", 2, ["strategy.packing", "one of bucket, parameter, flat"]),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    told = message(tmp_path, text)
    assert told.startswith(f"{tmp_path / 'run.yaml'}:{line}: ")
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optim.lrr", "1"], ["--optim.lrr", "--optim.lr "]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--optim.schedule", "step"], ["--optim.schedule", "cosine"]),
        (["--steps"], ["--steps"]),
    ],
)
def test_a_wrong_flag_is_named_with_status_2(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_train_arguments(flags)
    assert caught.value.code == 2
    told = "".join(capsys.readouterr())
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "at least 1 worker"),
        (["--workers", "-3"], "at least 1 worker"),
        (["--workers", "9", "--batch", "8"], "8 samples cannot be shared by 9 ranks"),
        (["--model.preset", "tinny"], "did you mean 'tiny'"),
        (["--model.width", "130"], "width must be a multiple of heads"),
        (["--optim.clip", "-1"], "optim.clip"),
        (["--strategy.gradients", "mean"], "strategy.gradients"),
        (["missing.yaml"], "missing.yaml: cannot be read: No such file"),
        (["no-such-thing"], "no-such-thing: cannot be read"),
    ],
)
def test_a_value_out_of_range_is_explained(flags: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_train_arguments(flags)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    config = parse_train_arguments(["--model.vocabulary", "1000"])
    with pytest.raises(UserError, match="at least 2048"):
        config.model.shape(2048)
    assert config.model.shape(900).vocabulary == 1000


floats = st.floats(min_value=1e-12, max_value=0.999, allow_nan=False)
configs = st.builds(
    TrainConfig,
    optim=st.builds(
        OptimConfig,
        lr=floats,
        betas=st.tuples(floats, floats),
        eps=floats,
        warmup=st.floats(min_value=0, max_value=1e4),
        schedule=st.sampled_from(["cosine", "linear", "constant"]),
    ),
    strategy=st.builds(
        Strategy, gradients=st.just("sum"), bucket_mb=floats, units=st.lists(st.text(min_size=1)).map(tuple)
    ),
    log=st.builds(LogConfig, every=st.integers(1, 10**9), tensorboard=st.booleans()),
    steps=st.integers(1, 10**12),
    workers=st.none() | st.integers(1, 8),
    folder=st.none() | st.text(min_size=1).filter(str.strip),
)


@settings(max_examples=40, deadline=None)
@given(config=configs)
@example(config=TrainConfig(folder="läufe/0\x85\u2028"))
def test_printing_and_reading_a_configuration_gives_the_same_one(
    config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    node = read_yaml(str(path))
    assert node is not None
    assert overlay(defaults("nano"), node, str(path)) == config
