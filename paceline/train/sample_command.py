"""`paceline sample`: a run's model continues a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from paceline.command_line import json_file
from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.launch.screen import visible


@dataclass(frozen=True)
class SampleArguments:
    """Lets the model of a finished, interrupted or running run continue a prompt."""

    run: Annotated[str, Value("RUN", positional=True)]
    """The run's folder, such as runs/latest."""
    prompt: str = "def "
    """What the text begins with; '' for the beginning of a document."""
    tokens: int = 200
    """Most tokens to add."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 draws as the model predicts."""
    top_k: int = 40
    """Draw from so many likeliest tokens; 0 for all."""
    seed: int | None = None
    """Makes the text repeatable. Without it: another one each time."""
    json: JsonFile = ""
    """Where to write the text as JSON, control characters as they are; - prints that and nothing else."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UserError: One is out of its range.
        """
        for name, value, good, expected in (
            ("tokens", self.tokens, self.tokens >= 0, "0 or more tokens"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (the likeliest token) or above"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
        ):
            if not good:
                raise UserError(f"--{name}: expected {expected}, got {value}")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"--prompt: expected UTF-8 text, got other bytes at character {error.start}") from None


def main(arguments: Sequence[str]) -> int:
    """Prints the prompt and what the model makes of it; returns the exit status.

    Raises:
        UserError: An option makes no sense, there is no such run, or its files do not fit.
    """
    options = parse(SampleArguments, arguments, "paceline sample")
    from paceline.train.run_folder import WEIGHTS, find_run

    # A mistake is told before torch is imported, which takes seconds.
    find_run(options.run, WEIGHTS)
    from paceline.train.sample import sample_run

    pieces = []
    for piece in sample_run(
        options.run, options.prompt, options.tokens, options.temperature, options.top_k, options.seed
    ):
        pieces.append(piece)
        if options.json != json_file.SCREEN:
            print(visible(piece), end="", flush=True)
    if options.json != json_file.SCREEN:
        print()
    json_file.write(options.json, {"run": options.run, "prompt": options.prompt, "text": "".join(pieces)})
    return 0
