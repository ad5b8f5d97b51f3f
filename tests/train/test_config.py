from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.models.presets import PRESETS
from paceline.train.command_line import parse_train_arguments
from paceline.train.config import TrainConfig
from paceline.train.defaults import defaults
from paceline.train.sections import LogConfig, OptimConfig
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


def test_the_precision_is_left_to_the_device_and_tf32_is_for_float32_on_gpus() -> None:
    config = parse_train_arguments(["--tf32"])
    assert config.strategy.precision == "auto" and not parse_train_arguments([]).tf32
    low, full = (replace(config, strategy=replace(config.strategy, precision=p)) for p in ("bfloat16", "float32"))
    assert [full.multiplies_in("cuda"), full.multiplies_in("cpu"), low.multiplies_in("cuda")] == [
        "tf32",
        "float32",
        "bfloat16",
    ]


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
        ("optim:\n  lr: .inf\n", 2, ["optim.lr: expected a number above 0, got inf"]),
        ("optim:\n  clip: .nan\n", 2, ["optim.clip: expected 0 (no limit) or more, got nan"]),
        ("optim:\n  lr: '3e-4'\n", 2, ["optim.lr: expected a number, got '3e-4'"]),
        ("model:\n  preset: [a]\n", 2, ["model.preset: expected text, got ['a']"]),
        ("data:\n  path: [[a], {b: c}]\n", 2, ["each item text, got [a list, a mapping]"]),
        ("steps: {a: 1}\n", 1, ["steps: expected a whole number, got a mapping"]),
        ("steps: !!python/name:os.system ''\n", 1, ["steps: expected a whole number, got "]),
        ("? [steps, 1]\n: 5\n", 1, ["unknown key ['steps', 1]"]),
        ("strategy:\n  packing: bags\n", 2, ["strategy.packing", "one of bucket, parameter, flat"]),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    told = message(tmp_path, text)
    assert told.startswith(f"{tmp_path / 'run.yaml'}:{line}: ")
    for word in words:
        assert word in told


def aliases(first: str, form: str) -> str:
    """Lines of a list whose items hold nine aliases of the item before: 9 ** 40 values if they were written out."""
    items = [first, *(form.format(", ".join([f"*p{n}"] * 9)) for n in range(39))]
    return "\n".join(f"    - &p{n} {item}" for n, item in enumerate(items))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:\n  path:\n" + aliases("[x]", "[{}]"), "each item text, got [a list, a list, "),
        ("steps:\n" + aliases("{x: 1}", "{{<<: [{}]}}"), "got [a mapping, a mapping, "),
        ("steps: &s [*s, *s]\n", "expected a whole number, got [a list, a list]"),
        ("steps: " + "[" * 2_000, "nested too deeply"),
        ("steps: " + "[" * 200 + "]" * 200, "steps: expected a whole number, got [a list]"),
        ("steps: " + "1" * 5000, "steps: expected a whole number, got 1111"),
        ("steps: 0x" + "f" * 5000, "steps: expected a whole number, got 0xffff"),
        ("optim:\n  lr: " + "1" * 5000, "optim.lr: expected a number, got 1111"),
        ("steps: '" + "many " * 5000 + "'", "steps: expected a whole number, got 'many many "),
        ("? " + "steps" * 5000 + "\n: 1", "unknown key 'stepssteps"),
        ("steps: \0", "not valid YAML"),
    ],
    ids=lambda value: value[:20].strip(),
)
def test_a_file_of_bad_will_ends_in_one_short_line(tmp_path: Path, text: str, words: str) -> None:
    told = message(tmp_path, text)
    assert words in told
    assert "\n" not in told and "Node(" not in told and len(told) < len(str(tmp_path)) + 400


def test_numbers_with_an_exponent_need_no_dot_and_texts_that_look_so_stay_texts(tmp_path: Path) -> None:
    for written in ("3e-4", "+3E-4", "3.e-4", ".3e-3", "0.0003", "30_0e-6"):
        assert from_file(tmp_path, f"optim: {{lr: {written}}}").optim.lr == pytest.approx(3e-4)
    assert from_file(tmp_path, "folder: '3e-4'").folder == "3e-4"
    assert from_file(tmp_path, "optim: {lr: 1}").optim.lr == 1.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optim.lrr", "1"], ["--optim.lrr", "--optim.lr?"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--optim.schedule", "step"], ["--optim.schedule", "cosine"]),
        (["--steps"], ["--steps"]),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_train_arguments(flags)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "at least 1 worker"),
        (["--workers", "-3"], "at least 1 worker"),
        (["--workers", "9", "--batch", "8"], "8 samples cannot be shared by 9 ranks"),
        (["--model.preset", "tinny"], "did you mean 'tiny'"),
        (["--model.width", "130"], "width must be a multiple of heads"),
        (["--optim.clip", "-1"], "optim.clip"),
        (["--optim.lr", "inf"], "optim.lr: expected a number above 0, got inf"),
        (["--steps", "1" * 400], "expected a whole number, got one of 400 digits"),
        (["--steps", str(2**63)], "expected a whole number, got one of 19 digits"),
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
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
"""What a file can be called: other texts are refused in a configuration."""
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
    strategy=st.builds(Strategy, gradients=st.just("sum"), bucket_mb=floats, units=st.lists(names).map(tuple)),
    log=st.builds(LogConfig, every=st.integers(1, 10**9), tensorboard=st.booleans()),
    steps=st.integers(1, 10**12),
    workers=st.none() | st.integers(1, 8),
    folder=st.none() | names.filter(str.strip),
)


@settings(max_examples=40, deadline=None)
@given(config=configs)
@example(config=TrainConfig(folder="läufe/0\x85\u2028"))
@example(config=TrainConfig(folder="1e5"))
def test_printing_and_reading_a_configuration_gives_the_same_one(
    config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    node = read_yaml(str(path))
    assert node is not None
    assert overlay(defaults("nano"), node, str(path)) == config
