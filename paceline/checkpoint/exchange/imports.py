"""Checkpoints made of what others wrote: `paceline checkpoint import`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from paceline.checkpoint.exchange.huggingface import TOKENIZER, read_huggingface
from paceline.checkpoint.exchange.new_checkpoint import write_checkpoint
from paceline.checkpoint.exchange.tensor_file import Lazy
from paceline.checkpoint.exchange.torch_files import is_dcp, read_torch, require_storable
from paceline.checkpoint.exchange.torch_optimizer import to_checkpoint
from paceline.checkpoint.plain import encode
from paceline.core.errors import UserError
from paceline.models.config import ModelConfig
from paceline.models.flops import parameter_count
from paceline.models.presets import PRESETS

SETTINGS = "train.yaml"
"""File beside an imported model's checkpoint: what `paceline train` needs to go on with it."""
_SCHEDULERS = ("scheduler", "scheduler_state_dict", "lr_scheduler")
"""What people call a scheduler's state."""


def import_checkpoint(path: Path, out: Path, optimizers: Sequence[str], trust: bool) -> list[str]:
    """Makes a checkpoint.

    Args:
        path: A folder of Hugging Face's or of PyTorch DCP's, or a file of `torch.save`.
        out: The folder to make.
        optimizers: Classes of the optimizers whose states are taken too, in their order in the file; empty for none.
        trust: Whether code in what is read may run, where it cannot be read otherwise.

    Returns:
        What was done, in lines.

    Raises:
        UserError: There is nothing of these kinds at `path`, or it cannot be used; nothing is left of `out`.
    """
    if not path.exists():
        raise UserError(
            f"{path} is not there: name a folder of Hugging Face's or PyTorch DCP's, or a torch.save'd file"
        )
    if path.is_dir() and not is_dcp(path):
        if not (path / "config.json").is_file():
            raise UserError(
                f"{path} holds neither Hugging Face's config.json nor PyTorch DCP's .metadata: name such a folder, or "
                "a torch.save'd file"
            )
        if optimizers:
            raise UserError("--optimizer: Hugging Face's folders hold no states of optimizers; leave it out")
        return _import_huggingface(path, out)
    return _import_torch(path, out, optimizers, trust)


def _import_huggingface(path: Path, out: Path) -> list[str]:
    found = read_huggingface(path)
    settings: dict[str, Any] = {"model": {"preset": _nearest(found.config), **asdict(found.config)}}
    beside = {}
    if found.tokenizer is not None:
        beside[TOKENIZER] = found.tokenizer.read_bytes()
        settings["data"] = {"tokenizer": str(out.absolute() / TOKENIZER)}
    settings["weights"] = str(out.absolute())
    beside[SETTINGS] = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode()
    tensors = [_weight(tensor) for tensor in found.tensors]
    write_checkpoint(out, tensors, [], [], {"model": asdict(found.config)}, 0, beside)
    return [
        f"{out}: {parameter_count(found.config) / 1e6:,.2f} M parameters in {len(tensors)} tensors",
        f"train on: paceline train {out / SETTINGS} --data.path YOUR_TEXT",
    ]


def _nearest(config: ModelConfig) -> str:
    """The preset whose training settings fit a model: that of the nearest number of parameters."""
    count = parameter_count(config)
    return min(PRESETS, key=lambda name: max(count, other := parameter_count(PRESETS[name])) / min(count, other))


def _weight(tensor: Lazy) -> Lazy:
    return Lazy(f"model/{tensor.name}", tensor.dtype, tensor.shape, tensor.read)


def _import_torch(path: Path, out: Path, optimizers: Sequence[str], trust: bool) -> list[str]:
    found = read_torch(path, trust)
    tensors = [_weight(_lazy(name, tensor)) for name, tensor in found.weights.items()]

    def put(tensor: Tensor) -> str:
        require_storable("a value", tensor)
        name = f"values of rank 0/{len(tensors)}"
        tensors.append(_lazy(name, tensor.reshape(-1)))
        return name

    lines, optimizer_values = [], []
    if optimizers and len(optimizers) != len(found.optimizers):
        raise UserError(
            f"--optimizer: {path} holds the states of {len(found.optimizers) or 'no'} optimizers; name the class of "
            "each, or leave it out"
        )
    if not optimizers and found.optimizers:
        lines.append("  without the optimizer's states: --optimizer CLASS, such as AdamW, takes these too")
    for number, (kind, state_dict) in enumerate(zip(optimizers, found.optimizers, strict=False)):
        values, states = to_checkpoint(number, kind, state_dict, found.weights, put)
        tensors += states
        optimizer_values.append(values)
        lines.append(f"  states of {kind} for {len({state.name.split('/')[1] for state in states})} parameters")
    others: dict[str, Any] = {}
    for name, value in found.others.items():
        known = len(tensors)
        try:
            others[name] = encode(value, put, name)
        except UserError:
            del tensors[known:]
            lines.append(f"  without {name}, which would need code to be read again")
    step = others.pop("step", 0)
    schedulers = [others.pop(name) for name in _SCHEDULERS if name in others]
    # What was exported from a checkpoint has all of its own there.
    extra = others["extra"] if others.keys() == {"extra"} else others
    write_checkpoint(out, tensors, optimizer_values, schedulers, extra, step if type(step) is int and step >= 0 else 0)
    return [f"{out}: {len(found.weights)} parameters and buffers", *lines]


def _lazy(name: str, tensor: Tensor) -> Lazy:
    return Lazy(name, tensor.dtype, tuple(tensor.shape), partial(tensor.detach))
