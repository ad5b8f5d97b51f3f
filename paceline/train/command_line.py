"""`paceline train [FILE.yaml] [--section.key value ...]` becomes one TrainConfig."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from paceline.errors import UserError
from paceline.train.config import TrainConfig
from paceline.train.defaults import defaults
from paceline.train.yaml_file import overlay, preset_in, read_yaml

DESCRIPTION = """\
Trains a Transformer data-parallel.

Without anything it trains a small GPT on the source of Python's standard library in about two minutes.
A preset brings settings that fit it, a YAML file overrides them, flags override both:

    paceline train --workers 2
    paceline train run.yaml --optim.lr 3e-4 --data.path notes/ 'logs/*.jsonl'
    paceline train --model.preset small --print-config > small.yaml

--print-config prints the resulting configuration as YAML and ends. torchrun and Slurm start the same command."""


def parse_train_arguments(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that the arguments of `paceline train` describe.

    Precedence, lowest first: the preset's settings, the YAML file, the flags. A preset given as a flag replaces
    the file's model section, if that one names another.

    Raises:
        UserError: The file cannot be read, a key in it is unknown or ill-typed, or a value is out of range.
        SystemExit: --help (status 0), or a flag is unknown or ill-typed (status 2); both are explained on the screen.
    """
    path, flags = _split_file(arguments)
    node = read_yaml(path) if path is not None else None
    in_file, in_flags = preset_in(node), _preset_flag(flags)
    config = defaults(in_flags or in_file or "tiny")
    if node is not None and path is not None:
        replaced = "model" if in_flags is not None and in_flags != in_file else ""
        config = overlay(config, node, path, skip=replaced)
    return tyro.cli(
        TrainConfig,
        prog="paceline train",
        args=flags,
        default=config,
        description=DESCRIPTION,
        use_underscores=True,
    )


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
    return arguments[files[0]], [item for index, item in enumerate(arguments) if index != files[0]]


def _preset_flag(flags: Sequence[str]) -> str | None:
    chosen = None
    for index, flag in enumerate(flags):
        if flag == "--model.preset" and index + 1 < len(flags):
            chosen = flags[index + 1]
        elif flag.startswith("--model.preset="):
            chosen = flag.partition("=")[2]
    return chosen
