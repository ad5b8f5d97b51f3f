"""Weights on disk: one safetensors file that also says which model they belong to."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import UserError
from paceline.models.config import ModelConfig
from paceline.models.transformer import Transformer


def save_weights(model_state: Mapping[str, Tensor], path: str | Path, config: ModelConfig) -> None:
    """Write a model's `state_dict` to `path`, whole or not at all.

    The file is written under a temporary name beside `path`, forced to disk and renamed, so that a crash
    leaves the old file or the new one. Tensors that share memory are stored once. The metadata holds the
    model's shape, the tied names and a CRC-32 of the data, as safetensors itself detects no flipped bit.

    Args:
        model_state: Name to tensor, any dtype and device.
        path: File to write or replace, usually `*.safetensors`.
        config: Shape of the model.

    Raises:
        UserError: The file can't be written, for instance because the disk is full.
    """
    path = Path(path)
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    for name, tensor in model_state.items():
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        owner = first_name.setdefault(identity, name) if tensor.numel() else name
        if owner == name:
            # A copy of a view only: tensors in a flat buffer share its storage, which the format refuses.
            stored[name] = _standalone(tensor.detach().cpu())
        else:
            tied[name] = owner
    metadata = {
        "format": "pt",
        "paceline.config": json.dumps(dataclasses.asdict(config)),
        "paceline.tied": json.dumps(tied),
        "paceline.crc32": str(_checksum(stored)),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(stored, temporary, metadata)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"Cannot write the weights to {path}: {error}. Free space there or choose another folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_weights(path: str | Path) -> tuple[dict[str, Tensor], ModelConfig]:
    """Read what `save_weights` wrote: the state, on the CPU, and the model's shape.

    Tied names map to one tensor, as they did when saved.

    Raises:
        UserError: The file is missing, damaged, or not one that `save_weights` wrote.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There are no weights at {path}: expected a file that a training run wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = ModelConfig(**json.loads(metadata["paceline.config"]))
        tied = {name: state[owner] for name, owner in json.loads(metadata["paceline.tied"]).items()}
        expected = int(metadata["paceline.crc32"])
    except KeyError as error:
        raise UserError(
            f"{path} holds tensors but not {error.args[0]!r}: only files that paceline wrote "
            "say which model the weights belong to."
        ) from error
    except (OSError, SafetensorError, ValueError, TypeError, UserError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}): use another copy of it.") from error
    if _checksum(state) != expected:
        raise UserError(f"{path} is damaged: its data does not match its checksum. Use another copy of it.")
    return state | tied, config


def load_model(path: str | Path) -> Transformer:
    """The model that a file of `save_weights` describes, on the CPU, in the stored dtypes.

    Raises:
        UserError: As `load_weights`, or the tensors do not fit the shape stored with them.
    """
    state, config = load_weights(path)
    with torch.device("meta"):
        model = Transformer(config)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(f"The weights in {path} do not fit the model described there: {error}") from error
    if config.tied:
        model.head.weight = model.embedding.weight
    return model


def _standalone(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and fills its storage, otherwise a copy that does."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _checksum(state: Mapping[str, Tensor]) -> int:
    """CRC-32 over the tensors' bytes in order of their names."""
    crc = 0
    for name in sorted(state):
        crc = zlib.crc32(state[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def _flush(path: Path) -> None:
    """Force a file's data, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
