"""Whether a checkpoint is of the model that it is loaded into."""

from __future__ import annotations

from msgspec.structs import astuple
from torch import nn

from paceline.checkpoint.manifest import Manifest, Stored
from paceline.checkpoint.module_states import persistent_buffers, tied_names
from paceline.checkpoint.ranges import Ranges
from paceline.core.errors import UserError

_NAMED = 5
"""Names of a difference that are told."""


def require_same_model(manifest: Manifest, module: nn.Module, ranges: Ranges) -> None:
    """Compares the model's names and shapes with a checkpoint's.

    Raises:
        UserError: They differ; names the first.
    """
    mine = {f"model/{name}": tuple(ranges.spec(index).shape) for index, name in enumerate(ranges.names)}
    mine |= {f"model/{name}": tuple(buffer.shape) for name, buffer in persistent_buffers(module)}
    theirs = {name: stored.shape for name, stored in manifest.tensors.items() if name.startswith("model/")}
    for name, first in tied_names(module).items():
        # What did not come from here may hold it under each of its names.
        if _same(manifest.tensors.get(f"model/{name}"), manifest.tensors.get(f"model/{first}")):
            del theirs[f"model/{name}"]
    shapes = [
        f"{name} {list(theirs[name])}, now {list(shape)}"
        for name, shape in mine.items()
        if name in theirs and theirs[name] != shape
    ]
    told = [
        f"{what} {', '.join(name.removeprefix('model/') for name in names[:_NAMED])}"
        + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        for what, names in (
            ("it lacks", [name for name in mine if name not in theirs]),
            ("only it has", [name for name in theirs if name not in mine]),
            ("shapes differ:", shapes),
        )
        if names
    ]
    if told:
        raise UserError(f"the checkpoint is of another model: {'; '.join(told)}. Build the model as it was saved")


def _same(one: Stored | None, other: Stored | None) -> bool:
    """Whether two tensors hold the same."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return [part[1:] for part in map(astuple, one.parts)] == [part[1:] for part in map(astuple, other.parts)]
