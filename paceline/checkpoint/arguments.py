"""What `paceline checkpoint` is told, apart from what does it, as that takes long to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.core.errors import UserError


@dataclass(frozen=True)
class CheckpointArguments:
    """Shows, verifies, exports, imports and prunes checkpoints: those of a run, of a folder, or one by its name."""

    action: Annotated[Literal["show", "verify", "export", "import", "prune"], Value("ACTION", positional=True)]
    """show: what they hold. verify: read every byte and compare checksums. export: write the latest one as others read
    it. import: make one of what others wrote. prune: remove old ones, and unfinished ones that are older than the
    latest."""
    path: Annotated[str, Value("PATH", positional=True)]
    """A run's folder such as runs/latest, a folder of checkpoints, or one checkpoint. With import: a folder of Hugging
    Face's (GPT-2 or Llama) or of PyTorch DCP's, or a file that torch.save wrote."""
    format: Literal["safetensors", "huggingface", "torch"] = "safetensors"
    """With export. safetensors: the weights, one file. huggingface: a folder that transformers loads. torch: weights
    and whole states of optimizers, one file for torch.load."""
    keep: int = 2
    """With prune: how many of the latest stay."""
    keep_every: int = 0
    """With prune: those of steps that this divides stay too. 0: none."""
    out: str = ""
    """With export and import: the file or folder to write, which must be new. Without it export writes
    model.safetensors, huggingface or checkpoint.pt."""
    optimizer: tuple[str, ...] = ()
    """With import: the class of the optimizer whose states are taken too, such as AdamW; of several, in their order.
    Without it: weights alone."""
    trust: bool = False
    """With import: whether code that is in the file may run, where it cannot be read otherwise. For files whose writer
    you trust as yourself."""
    json: JsonFile = ""
    """Where to write what was found as JSON; - prints it, and all else goes to stderr."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UserError: One is out of its range.
        """
        if self.keep < 1:
            raise UserError(f"--keep: expected 1 or more, got {self.keep}")
        if self.keep_every < 0:
            raise UserError(f"--keep-every: expected 0 (none) or more steps, got {self.keep_every}")
        if self.action == "import" and not self.out:
            raise UserError("--out: name the folder of the checkpoint to make")
