"""`paceline train [FILE.yaml] [--section.key value ...]` becomes one TrainConfig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.command_line.help_page import help_page, option_list
from paceline.command_line.options import options
from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.train.config import AUTO, TrainConfig
from paceline.train.defaults import defaults
from paceline.train.run_folder import CONFIG, run_of
from paceline.train.yaml_file import overlay, preset_in, read_yaml

USAGE = "[FILE.yaml] [--setting VALUE ...]"
DESCRIPTION = """\
Trains a Transformer data-parallel; without anything a small GPT on the source
of Python's own library, in about two minutes. A preset brings settings that
fit it, a YAML file overrides them, flags override both:

    paceline train --workers 2
    paceline train run.yaml --optim.lr 3e-4 --data.path notes/ 'logs/*.jsonl'

--print-config prints all settings as YAML; --help-all explains them all."""

MOST_USED = {
    "--data.path": "Files, folders, globs of text",
    "--model.preset": "nano, tiny, small, gpt2-124m ...",
    "--model.layers": "Blocks",
    "--model.width": "Width of the residual stream",
    "--model.context": "Longest sequence in tokens",
    "--steps": "Optimizer steps",
    "--batch": "Samples in a step, over all ranks",
    "--micro-batch": "Samples that a rank takes at once",
    "--optim.lr": "Highest learning rate",
    "--optim.schedule": "How it falls after the warmup",
    "--workers": "Processes to start on this host",
    "--threads": "Threads of each; 0: by cores",
    "--strategy.zero": "Stage of ZeRO, 0 to 3",
    "--strategy.precision": "auto, float32, bfloat16, float16",
    "--strategy.recompute": "What backward computes again",
    "--log.every": "Steps between two lines of figures",
    "--log.validate-every": "Steps between validations",
    "--log.events-every": "Steps between those to trace",
    "--folder": "The run's folder; else in runs/",
    "--resume": "Goes on with a run, or auto",
    "--weights": "A checkpoint to begin with",
    "--checkpoint.every": "Steps, or time such as 10m",
    "--seed": "Of weights and order of samples",
}
"""What `train --help` shows, a line each."""

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".gz")


def parse_train_arguments(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that the arguments of `paceline train` describe.

    Precedence, lowest first: the preset's settings, the YAML file, the flags. A preset given as a flag replaces
    the file's model section, if that one names another.

    Raises:
        UserError: The file cannot be read, a key in it or a flag is unknown or ill-typed, or a value is out of range.
        SystemExit: --help or --help-all, which is printed (status 0).
    """
    path, flags = _split_file(arguments)
    resumed = _flag("--resume", flags)
    if path is None and resumed not in (None, AUTO):
        # A run goes on with its own settings, but for what flags say.
        path = str(run_of(resumed) / CONFIG)
    node = read_yaml(path) if path is not None else None
    in_file, in_flags = preset_in(node), _flag("--model.preset", flags)
    config = defaults(in_flags or in_file or "tiny")
    if node is not None and path is not None:
        replaced = "model" if in_flags is not None and in_flags != in_file else ""
        config = overlay(config, node, path, skip=replaced)
    if "--help-all" in flags:
        print(help_page("paceline train", DESCRIPTION, list(options(TrainConfig, config)), USAGE), end="")
        raise SystemExit(0)
    if "--help" in flags or "-h" in flags:
        known = {option.flag: option for option in options(TrainConfig, config)}
        print(f"usage: paceline train {USAGE}\n\n{DESCRIPTION}\n")
        print(
            option_list([replace(known[flag], in_short=text) for flag, text in MOST_USED.items()], full=False), end=""
        )
        raise SystemExit(0)
    return parse(TrainConfig, flags, "paceline train", config)


def _split_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    files = [
        index
        for index, argument in enumerate(arguments)
        if not argument.startswith("-") and (index == 0 or argument.endswith((".yaml", ".yml")))
    ]
    if len(files) > 1:
        named = " and ".join(arguments[index] for index in files)
        raise UserError(f"expected one configuration file, got {named}; merge them or override by flags")
    if not files:
        return None, list(arguments)
    if arguments[files[0]].endswith(TEXT_SUFFIXES):
        raise UserError(
            f"{arguments[files[0]]}: expected a configuration such as run.yaml; "
            f"to train on this text: --data.path {arguments[files[0]]}"
        )
    return arguments[files[0]], [item for index, item in enumerate(arguments) if index != files[0]]


def _flag(name: str, flags: Sequence[str]) -> str | None:
    """What a flag is given, which decides how the others are read."""
    chosen = None
    for index, flag in enumerate(flags):
        if flag == name and index + 1 < len(flags):
            chosen = flags[index + 1]
        elif flag.startswith(f"{name}="):
            chosen = flag.partition("=")[2]
    return chosen
