"""What `paceline verify` is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.command_line.parse import parse as parse_options
from paceline.core.errors import UserError


@dataclass(frozen=True)
class VerifyArguments:
    """Compares training with N ranks, at every stage of ZeRO, with training in one process.

    Give a function that builds your model, and one that gives batches:

        paceline verify my_module:build --data my_module:batches

    The table shows the largest relative difference in any step, on any rank. Where something differs, the first step,
    parameter and operation are named. The exit status is 0 if all is equal, 1 if not.
    """

    build: Annotated[str, Value("MODULE:FUNCTION", positional=True)] = ""
    """module:function that returns a torch.nn.Module, the same one under the same seed."""
    data: Annotated[str, Value("MODULE:NAME")] = ""
    """A function (step) -> batch, or an iterable of batches: tensors, tuples or dicts of tensors whose first dimension
    is the samples. May be left out for paceline's Transformer and Hugging Face language models."""
    loss: Annotated[str, Value("MODULE:NAME")] = ""
    """A function (output, batch) -> scalar; by default the model's return value, its .loss or its ["loss"]."""
    workers: int = 2
    """Number of ranks. Hybrid sharding is compared where they form equal groups: from 4 on."""
    steps: int = 3
    """Optimizer steps."""
    micro_batches: tuple[int, ...] = (1, 2)
    """Numbers of micro-batches per rank and step to compare with."""
    dtype: Literal["float64", "float32"] = "float64"
    """What to compute in; float32 rounds, so that only differences above 1e-3 are told from it."""
    eval: bool = False
    """Put the model in evaluation mode: without dropout, BatchNorm with its running statistics."""
    timeout: float = 600.0
    """Seconds after which one comparison is given up."""
    matrix: bool = False
    """Compare paceline's own model instead, in every mix of strategy, accumulation, precision and recomputing."""
    markdown: Annotated[str, Value("FILE")] = ""
    """With --matrix: the page to write."""
    json: JsonFile = ""
    """Where to write the comparisons as JSON; - prints them, and all else goes to stderr."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UserError: One is out of range, or two exclude each other.
        """
        if not self.matrix and not self.build:
            raise UserError(
                "verify: expected module:function that builds a model, such as my_module:build, or --matrix"
            )
        if self.matrix and (self.build or self.data or self.loss):
            raise UserError("verify --matrix compares paceline's own model: leave build, --data and --loss out")
        if self.markdown and not self.matrix:
            raise UserError("verify: --markdown goes with --matrix")
        if self.workers < 1 or self.steps < 1 or self.timeout <= 0:
            raise UserError("verify: --workers and --steps are at least 1, and --timeout is above 0")
        if not self.micro_batches or min(self.micro_batches) < 1:
            raise UserError("verify: --micro-batches are numbers from 1 on, such as --micro-batches 1 2")


def parse(arguments: Sequence[str]) -> VerifyArguments:
    """The options that the arguments of `paceline verify` describe.

    Raises:
        UserError: A flag is unknown, or values are ill-typed, out of range or exclude each other.
        SystemExit: --help.
    """
    return parse_options(VerifyArguments, arguments, "paceline verify")
