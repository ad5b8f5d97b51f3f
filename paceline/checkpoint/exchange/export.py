"""A checkpoint in the formats of others: `paceline checkpoint export`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.exchange.huggingface import TOKENIZER, write_huggingface
from paceline.checkpoint.exchange.tensor_file import Lazy, write_tensors
from paceline.checkpoint.exchange.torch_optimizer import from_checkpoint
from paceline.checkpoint.folder import sync
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.plain import decode
from paceline.checkpoint.reader import Reader
from paceline.core.errors import UserError
from paceline.models.config import ModelConfig

Write = Callable[[Path, Path, Manifest, Reader], None]
"""(what to write, the checkpoint's folder, its manifest, a reader of it)."""


def export(path: Path, manifest: Manifest, out: Path, form: str) -> None:
    """Writes what others read, whole or not at all.

    Args:
        path: The checkpoint's folder.
        manifest: Its.
        out: The file or folder to write, which must be new.
        form: A key of `FORMATS`.

    Raises:
        UserError: It is there already, cannot be written, or the format has no words for what is in the checkpoint.
    """
    if out.exists():
        raise UserError(f"--out: {out} is there already: name a new {'folder' if form == 'huggingface' else 'file'}")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        FORMATS[form](temporary, path, manifest, Reader(path, manifest.tensors))
        sync(temporary)
        temporary.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}: choose another --out") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _weights(manifest: Manifest, reader: Reader) -> list[Lazy]:
    """The model's state under the names of its `state_dict`, of which what is tied has several."""
    first = {name.removeprefix("model/"): name for name in manifest.tensors if name.startswith("model/")}
    named = first | {name: first[other] for name, other in manifest.values.get("tied", {}).items()}
    return [
        Lazy(name, reader.dtype(full), manifest.tensors[full].shape, partial(reader.read, full))
        for name, full in named.items()
    ]


def _safetensors(out: Path, path: Path, manifest: Manifest, reader: Reader) -> None:
    write_tensors(out, _weights(manifest, reader))


def _torch(out: Path, path: Path, manifest: Manifest, reader: Reader) -> None:
    """All of it, as one process would have saved it with `torch.save`."""
    held: dict[str, Tensor] = {}
    for tensor in _weights(manifest, reader):
        held[tensor.name] = tensor.read().reshape(tensor.shape)
    # One tensor for all names, as it was.
    held |= {name: held[first] for name, first in manifest.values.get("tied", {}).items()}
    # NumPy's arrays would be code to torch.load.
    schedulers, extra = (decode(_tensors(manifest.values[key]), reader.read) for key in ("schedulers", "extra"))
    optimizers = [from_checkpoint(manifest, reader, number) for number in range(len(manifest.values["optimizers"]))]
    whole: dict[str, Any] = {"model": held, "step": manifest.step, "extra": extra}
    for name, states in (("optimizer", optimizers), ("scheduler", schedulers)):
        if states:
            whole[name] = states[0] if len(states) == 1 else states
    with out.open("xb") as file:
        try:
            torch.save(whole, file)
        except RuntimeError as error:
            # What torch makes of a full disk.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _tensors(value: Any) -> Any:
    """An encoded value with tensors for arrays."""
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    if isinstance(value, dict):
        return {"$tensor" if key == "$array" else key: _tensors(item) for key, item in value.items()}
    return value


def _huggingface(out: Path, path: Path, manifest: Manifest, reader: Reader) -> None:
    config = model_of(decode(manifest.values["extra"], reader.read))
    if config is None:
        raise UserError(
            f"{path} does not say the shape of its model, which Hugging Face's config.json needs: export what "
            "`paceline train` saved, or in your own loop give pl.save extra={'model': dataclasses.asdict(model.config)}"
        )
    # In the checkpoint's own folder, or in its run's.
    tokenizers = (folder / TOKENIZER for folder in (path, path.absolute().parent.parent))
    out.mkdir()
    write_huggingface(out, config, manifest.tensors, reader, next(filter(Path.is_file, tokenizers), None))


FORMATS: dict[str, Write] = {"safetensors": _safetensors, "torch": _torch, "huggingface": _huggingface}


def model_of(extra: Any) -> ModelConfig | None:
    """The shape of a `Transformer`, if a checkpoint's `extra` says it.

    Raises:
        UserError: What is said there is no such shape.
    """
    if not isinstance(extra, dict) or "model" not in extra:
        return None
    try:
        return msgspec.convert(extra["model"], ModelConfig)
    except msgspec.ValidationError as error:
        raise UserError(f"the checkpoint's extra['model'] is no shape of a Transformer: {error}") from None
