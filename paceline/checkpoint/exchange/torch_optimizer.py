"""States of an optimizer as its `state_dict()` has them, by number and whole, and as a checkpoint has them, by name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.exchange.tensor_file import Lazy
from paceline.checkpoint.exchange.torch_files import require_storable
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.optimizer_states import element_name
from paceline.checkpoint.plain import decode, encode
from paceline.checkpoint.reader import Reader
from paceline.core.errors import UserError
from paceline.optimizers.elementwise import SHARD
from paceline.optimizers.no_part import OF_ALL

Put = Callable[[Tensor], str]


class _Group(msgspec.Struct):
    """What is needed of a parameter group."""

    params: list[int | str]
    param_names: list[str] | None = None


# ---- into a checkpoint


def to_checkpoint(
    number: int, kind: str, state_dict: Mapping[str, Any], weights: Mapping[str, Tensor], put: Put
) -> tuple[dict[str, Any], list[Lazy]]:
    """An optimizer's states by the names of parameters.

    Args:
        number: Which of the checkpoint's optimizers it is.
        kind: The optimizer's class.
        state_dict: What it returned in one process, or DCP's, which goes by names.
        weights: The model's state, in the order in which `state_dict` gave it.
        put: As of `encode`.

    Returns:
        What `OptimizerStates.values` would give, and the states that have a number for each element.

    Raises:
        UserError: It is none, holds shards, or whose states they are cannot be known.
    """
    try:
        groups = msgspec.convert(state_dict["param_groups"], list[_Group])
        states = msgspec.convert(state_dict["state"], dict[int | str, dict[str, Any]])
    except msgspec.ValidationError as error:
        raise UserError(f"the optimizer's states are not as torch writes them: {error}") from None
    if any(SHARD in group for group in state_dict["param_groups"]):
        raise UserError("the optimizer's states are one rank's shard: save by pl.save, which saves all ranks'")
    names = _names(groups, states, weights)
    where, tensors, values = f"{kind}'s state", [], defaultdict[str, dict[str, Any]](dict)
    for key, held in states.items():
        name = names.get(key)
        if name is None or name not in weights:
            raise UserError(f"{where} is there for {name or key}, which is no parameter of the model")
        for what, state in held.items():
            if isinstance(state, Tensor):
                require_storable(f"{where} {what} of {name}", state)
            if isinstance(state, Tensor) and state.shape == weights[name].shape and (state.dim() or what not in OF_ALL):
                full = element_name(number, name, what)
                tensors.append(Lazy(full, state.dtype, tuple(state.shape), lambda state=state: state))  # type: ignore[misc]
            else:
                # As releases of torch before 1.12 wrote it, which today's optimizers do not take.
                counted = torch.tensor(float(state)) if what == "step" and isinstance(state, int) else state
                values[name][what] = encode(counted, put, f"{where} {what} of {name}")
    settings = [
        {
            **{
                key: encode(value, put, f"{kind}'s {key}")
                for key, value in given.items()
                if key not in ("params", "param_names", SHARD)
            },
            "params": [names[key] for key in group.params],
        }
        for group, given in zip(groups, state_dict["param_groups"], strict=True)
    ]
    return {"kind": kind, "groups": settings, "states": dict(values), "shared": {}}, tensors


def _names(
    groups: Sequence[_Group], states: Mapping[int | str, dict[str, Any]], weights: Mapping[str, Tensor]
) -> dict[int | str, str]:
    """The names of an optimizer's parameters by what it calls them."""
    keys = [key for group in groups for key in group.params]
    if len(set(keys)) != len(keys):
        raise UserError("the optimizer's groups name a parameter twice")
    if all(isinstance(key, str) for key in keys):
        return {key: str(key) for key in keys}
    if all(group.param_names is not None and len(group.param_names) == len(group.params) for group in groups):
        return dict(zip(keys, [name for group in groups for name in group.param_names or ()], strict=True))
    return _by_order(groups, states, weights)


def _by_order(
    groups: Sequence[_Group], states: Mapping[int | str, dict[str, Any]], weights: Mapping[str, Tensor]
) -> dict[int | str, str]:
    """Names where an optimizer has but numbers: by order, as of `model.parameters()`, and by the shapes of states.

    Raises:
        UserError: There is more than one way to name them.
    """
    shape_of = {key: _shape(states.get(key, {})) for group in groups for key in group.params}
    left: dict[tuple[int, ...], list[str]] = defaultdict(list)
    seen = set()
    for name, tensor in weights.items():
        # What is tied is there once for each of its names; whole numbers are buffers.
        identity = (tensor.data_ptr(), tensor.shape) if tensor.numel() else name
        if identity not in seen and tensor.is_floating_point():
            seen.add(identity)
            left[tuple(tensor.shape)].append(name)
    known = all(shape is not None for shape in shape_of.values())
    counts = Counter(shape_of.values())
    # Each group keeps the model's order; two groups with parameters of one shape may share them out in any way.
    shared = Counter(shape for group in groups for shape in {shape_of[key] for key in group.params})
    if (
        not known
        or counts != {shape: len(names) for shape, names in left.items()}
        or any(n > 1 for n in shared.values())
    ):
        raise UserError(
            "the optimizer's states have numbers and no names, and these may belong to the weights in more ways than "
            "one: save an optimizer that was made of model.named_parameters(), whose states have names. Or leave "
            "--optimizer out, and give optimizer.load_state_dict() the whole states on every rank before the first step"
        )
    return {key: left[shape].pop(0) for key, shape in shape_of.items() if shape is not None}


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter, by its states; None where none tells."""
    shapes = {tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor) and key not in OF_ALL}
    return shapes.pop() if len(shapes) == 1 else None


# ---- out of a checkpoint


def from_checkpoint(manifest: Manifest, reader: Reader, number: int) -> dict[str, Any]:
    """The whole states of one optimizer, as its `load_state_dict` takes them in one process.

    Args:
        manifest: The checkpoint's.
        reader: Of its tensors.
        number: Which optimizer.
    """
    saved = manifest.values["optimizers"][number]
    names = [name for group in saved["groups"] for name in group["params"]]
    index_of = {name: index for index, name in enumerate(names)}
    groups = [
        {
            **{key: decode(value, reader.read) for key, value in group.items() if key != "params"},
            "params": [index_of[name] for name in group["params"]],
            "param_names": list(group["params"]),
        }
        for group in saved["groups"]
    ]
    states: dict[Any, Any] = decode(saved.get("shared", {}), reader.read)
    for name, index in index_of.items():
        held = decode(saved["states"].get(name, {}), reader.read)
        under = element_name(number, name, "")
        for full in reader.under(under):
            held[full.removeprefix(under)] = reader.read(full).reshape(manifest.tensors[full].shape)
        if held:
            states[index] = held
    return {"state": states, "param_groups": groups}
