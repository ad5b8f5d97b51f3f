"""What `torch.save` and PyTorch DCP wrote: read without running code, unless the user trusts who wrote it."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import ITEM_BYTES
from paceline.core.errors import UserError

_DCP = ".metadata"
"""The file that makes a folder one of DCP's."""
_MODELS = ("model", "model_state_dict", "state_dict")
"""What people call a model's state among other things, the most usual first."""
_WRAPPERS = ("module.", "_orig_mod.")
"""How all names begin that DistributedDataParallel and torch.compile gave."""


@dataclass(frozen=True)
class TorchState:
    """What was found.

    Attributes:
        weights: The model's state, by the names of its `state_dict`.
        optimizers: What the `state_dict` of each optimizer returned, in the order of the file.
        others: All other values, by their names.
    """

    weights: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    others: dict[str, Any]


def is_dcp(path: Path) -> bool:
    """Whether a folder is one that `torch.distributed.checkpoint.save` wrote."""
    return (path / _DCP).is_file()


def read_torch(path: Path, trust: bool) -> TorchState:
    """Reads a file of `torch.save`, or a folder of DCP's.

    Args:
        path: It.
        trust: Whether code in it may run, where it cannot be read otherwise.

    Raises:
        UserError: It cannot be read, would run code, or holds no model's state.
    """
    return _sorted_out(path, _read_dcp(path, trust) if is_dcp(path) else _read_file(path, trust))


def _read_file(path: Path, trust: bool) -> Any:
    # Only the format of today can be mapped: then what is not read takes no memory.
    mapped = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        if not trust:
            needed = re.search(r"GLOBAL (\S+)", str(error))
            if needed is None:
                raise _damaged(path, error) from error
            raise UserError(
                f"{path} cannot be read without running code: it holds {needed[1]}. If you trust whoever wrote it, "
                "give --trust; else let them save state_dict() alone"
            ) from None
    except Exception as error:  # a damaged file may make torch raise whatever there is
        raise _damaged(path, error) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=mapped)
    except Exception as error:  # the code in it raises what it likes
        raise _damaged(path, error) from error


def _read_dcp(path: Path, trust: bool) -> Any:
    if not trust:
        raise UserError(
            f"{path} is a folder of PyTorch DCP, whose {_DCP} is a pickle: reading it runs whatever code is in it. If "
            "you trust whoever wrote it, give --trust"
        )
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        told = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings():
                # That this one process is no job.
                warnings.simplefilter("ignore")
                dcp_to_torch_save(path, Path(folder, "whole.pt"))
        except CheckpointException as error:
            raise _damaged(path, next(iter(error.failures.values()))[0]) from error
        except Exception as error:  # the code in it raises what it likes
            raise _damaged(path, error) from error
        finally:
            logging.disable(told)
        return _read_file(Path(folder, "whole.pt"), trust)


def _damaged(path: Path, error: BaseException) -> UserError:
    # Torch's first sentence is about the file; advice for programmers follows.
    said = " ".join(str(error).partition("WeightsUnpickler error:")[2].split() or str(error).split())[:200]
    return UserError(f"{path} is damaged, or torch did not write it ({type(error).__name__}: {said}): use another copy")


def _sorted_out(path: Path, found: Any) -> TorchState:
    """Tells the model's state from the optimizer's and from all else."""
    if not isinstance(found, Mapping):
        raise UserError(
            f"{path} holds a {type(found).__name__}: expected what state_dict() returned, or a dictionary of such"
        )
    if _is_state(found):
        return TorchState(_checked(path, found), [], {})
    models = [name for name, value in found.items() if _is_state(value)]
    if not models:
        raise UserError(f"{path} holds no model's state_dict(): it has {', '.join(map(str, found))[:200] or 'nothing'}")
    model = next((name for name in _MODELS if name in models), models[0])
    if len(models) > 1 and model not in _MODELS:
        raise UserError(f"{path} holds {', '.join(map(str, models))}: save the one that is meant as 'model'")
    optimizers, others = [], {}
    for name, value in found.items():
        several = value if isinstance(value, list) and value else [value]
        if all(map(_is_optimizer, several)):
            optimizers += several
        elif name != model:
            others[str(name)] = value
    return TorchState(_checked(path, found[model]), optimizers, others)


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _checked(path: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's state without what wrappers put before all names."""
    for name, tensor in state.items():
        require_storable(f"{path}: {name}", tensor)
    names = list(state)
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in names):
            names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, state.values(), strict=True))


def require_storable(what: str, tensor: Tensor) -> None:
    """Refuses a tensor that a checkpoint cannot hold.

    Raises:
        UserError: It is sparse, of another dtype, on the device meta, or says to be larger than its memory.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UserError(f"{what} is a tensor of {tensor.layout} on {tensor.device}: expected a dense one with values")
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise UserError(f"{what} is {tensor.dtype}, which a checkpoint does not hold")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UserError(
            f"{what} says to have {tensor.numel():,} elements and has {tensor.untyped_storage().nbytes():,} bytes: "
            "save a contiguous copy of it"
        )
