"""Weights on disk: one safetensors file that also says which model they belong to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import textwrap
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig
from paceline.models.on_meta import on_meta
from paceline.models.transformer import Transformer

Decoded = TypeVar("Decoded")


def save_weights(model_state: Mapping[str, Tensor], path: str | Path, config: ModelConfig) -> None:
    """Write a model's `state_dict` to `path`, whole or not at all.

    The file is written under a temporary name next to `path`, forced to disk and renamed, so that a crash
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
        # An empty file shows which rights the umask leaves: safetensors makes files that nobody else can read.
        temporary.touch()
        rights = temporary.stat().st_mode
        save_file(stored, temporary, metadata)
        temporary.chmod(rights)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"Cannot write the weights to {path}: {error}. Free space there or choose another folder."
        ) from error
    finally:
        # A disk that is read-only refuses that, too.
        with contextlib.suppress(OSError):
            temporary.unlink()


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
        config = _decode(metadata["paceline.config"], ModelConfig)
        owners = _decode(metadata["paceline.tied"], dict[str, str])
        tied = {name: state[owner] for name, owner in owners.items() if name not in state}
        expected = int(metadata["paceline.crc32"])
    except KeyError as error:
        raise UserError(
            f"{path} holds tensors but not {error.args[0]!r}: only files that paceline wrote "
            "say which model the weights belong to."
        ) from error
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError, UserError) as error:
        raise UserError(
            f"{path} is damaged or not a safetensors file ({_in_short(error)}): use another copy of it."
        ) from error
    if _checksum(state) != expected:
        raise UserError(f"{path} is damaged: its data does not match its checksum. Use another copy of it.")
    return state | tied, config


def load_model(path: str | Path) -> Transformer:
    """The model that a file of `save_weights` describes, on the CPU, in the stored dtypes.

    Raises:
        UserError: As `load_weights`, or the tensors do not fit the shape stored with them.
    """
    state, config = load_weights(path)
    try:
        if config.layers > len(state):
            # Building so many would take for ever.
            raise ValueError(f"{config.layers:,} layers, but {len(state):,} tensors")
        if config.tied and state.get("head.weight") is not state.get("embedding.weight"):
            raise ValueError("embedding and head are said to be one tensor, but are two")
        model = on_meta(lambda: Transformer(config))
        model.load_state_dict(state, assign=True)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"The weights in {path} do not fit the model described there: {_in_short(error)}") from error
    if config.tied:
        model.head.weight = model.embedding.weight
    return model


def _decode(text: str, kind: type[Decoded]) -> Decoded:
    """JSON as what is expected; raises ValueError where it is something else, or more."""
    value = msgspec.json.decode(text)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        unknown = value.keys() - {field.name for field in dataclasses.fields(kind)}
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]!r} is unknown")
    return msgspec.convert(value, kind)


def _in_short(error: Exception) -> str:
    """An error in one line that is not long."""
    return textwrap.shorten(str(error), 300, placeholder=" …")


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
