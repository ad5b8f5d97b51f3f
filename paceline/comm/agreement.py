"""What ranks check before they trust each other's bytes."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.control import all_gather_json
from paceline.core.errors import UserError
from paceline.core.layout import ParameterSpec
from paceline.core.strategy import Strategy


def check_same_model(specs: Sequence[ParameterSpec], module: nn.Module, strategy: Strategy) -> None:
    """Compares the strategy, and names, shapes, strides, dtypes and units of parameters over ranks; buffers too.

    A collective call.

    Raises:
        UserError: Ranks differ; names the first difference and the ranks on each side.
    """
    mine = [[s.name, list(s.shape), s.dtype, s.trainable, list(s.stride), s.unit] for s in specs]
    mine += [[name, list(b.shape), str(b.dtype), False] for name, b in module.named_buffers()]
    digest = hashlib.blake2b(json.dumps(mine).encode()).hexdigest()
    told = all_gather_json([repr(strategy), digest], "strategy and digest of the model")
    strategies, digests = zip(*told, strict=True)
    if len(set(strategies)) > 1:
        other = next(rank for rank, text in enumerate(strategies) if text != strategies[0])
        raise UserError(
            f"ranks use different strategies; rank 0: {strategies[0]}; rank {other}: {strategies[other]}. Give every "
            "rank the same one"
        )
    if len(set(digests)) == 1:
        return
    models = all_gather_json(mine, "parameters of the model")
    for index in range(max(map(len, models))):
        entries = [json.dumps(model[index]) if index < len(model) else "nothing" for model in models]
        if len(set(entries)) > 1:
            sides = "; ".join(
                f"rank {', '.join(str(r) for r, e in enumerate(entries) if e == entry)}: {entry}"
                for entry in dict.fromkeys(entries)
            )
            raise UserError(
                f"ranks built different models; the first difference is parameter or buffer {index}: {sides}. Build "
                "the model from the same configuration on every rank"
            )


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's elements, in their order."""
    with torch._C.DisableTorchFunctionSubclass():
        elements = tensor.detach().reshape(-1).cpu().contiguous()
        return zlib.crc32(elements.view(torch.uint8).numpy().data) if elements.numel() else 0


def differing(tensors: Mapping[int, Tensor], what: str) -> list[int]:
    """Which tensors are not the same on every rank, to the bit; also those that a rank lacks. A collective call.

    Args:
        tensors: By a number that means the same on all ranks.
        what: They are, for messages.
    """
    told = all_gather_json({str(index): checksum(tensor) for index, tensor in tensors.items()}, what)
    indices = sorted({int(index) for each in told for index in each})
    return [index for index in indices if len({each.get(str(index)) for each in told}) > 1]


def agree_on_order(order: Sequence[str], inner: set[str]) -> list[str]:
    """One order of units for every rank: rank 0's, with what only others ran where they ran it. A collective call.

    Args:
        order: In which this rank ran them.
        inner: Those that ran inside others, which have no place in it: takes in other ranks'.
    """
    agreed: list[str] = []
    views = all_gather_json([list(order), sorted(inner)], "order of units")
    inner.update(*(inside for _, inside in views))
    for seen, _ in views:
        position = 0
        for unit in (each for each in seen if each not in inner):
            if unit not in agreed:
                agreed.insert(position, unit)
            position = agreed.index(unit) + 1
    return agreed
