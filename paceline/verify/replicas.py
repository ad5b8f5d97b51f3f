"""`pl.check_replicas`: whether ranks that should hold the same do, to the bit."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.agreement import checksum
from paceline.comm.control import all_gather_json
from paceline.core.errors import EngineError
from paceline.core.parameter_server import ParameterServer
from paceline.engine.api import engine_of
from paceline.engine.engine import Engine
from paceline.engine.recovery import require_between_steps
from paceline.tensors.state_shard import plain_state

_NAMED = 3
"""Tensors of a difference that are told."""


class _Held(NamedTuple):
    """What a rank holds of something that others hold, too."""

    name: str
    shard: int
    """Of which shard it is: ranks of other shards hold something else; -1 where every rank holds it."""
    tensor: Tensor


def check_replicas(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] = ()) -> int:
    """Compares what several ranks hold, bit by bit: a flipped bit on one of them would make replicas drift apart.

    A collective call, between two steps. Each rank reads its weights and states once and makes a CRC-32 of each; on
    GPUs they come to the host for that, one at a time. Compared are parameters as they are updated and as they are
    computed with, and states of the optimizer, where the strategy replicates them: all at stage 0, weights at stages 1
    and 2, shards over their replicas. Buffers are not: between two of a step's micro-batches they are each rank's own.

    Args:
        model: Parallel.
        optimizer: One or several that hold its parameters; left out, weights alone are compared.

    Returns:
        How many tensors of this rank others hold, too: 0 where each rank has shards of its own alone.

    Raises:
        EngineError: Some differ; names them and the ranks that hold something else than most, the same on every rank.
            Or all are alike, but this rank's were edited where the next update would lose it; names the parameter.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(8, 8))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> pl.check_replicas(model, optimizer)  # of one rank nobody else holds anything
        0
    """
    engine = engine_of(model)
    require_between_steps(engine, "pl.check_replicas", compares=True)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    sums = {
        f"{held.name}/{held.shard}": checksum(held.tensor)
        for held in (*_weights(engine), *_states(engine, optimizers))
        if _holders(engine, held.shard) > 1
    }
    # One number for each shard is enough where all is well.
    told: dict[str, int] = {}
    for key, value in sums.items():
        shard = key.rpartition("/")[2]
        told[shard] = zlib.crc32(f"{key} {value}".encode(), told.get(shard, 0))
    if _differ(all_gather_json(told, "pl.check_replicas")):
        _refuse(all_gather_json(sums, "pl.check_replicas: each tensor"))
    engine.program.parameters.require_unedited()
    return len(sums)


def _holders(engine: Engine, shard: int) -> int:
    return engine.world.world_size if shard < 0 else engine.schedule.position_in("replicate")[1]


def _weights(engine: Engine) -> Iterator[_Held]:
    flat = engine.program.parameters.flat
    for index, slot in enumerate(flat.layout.slots):
        name = slot.spec.name
        if index not in flat.local:
            yield _Held(name, -1, flat.all[index].data)
            continue
        updated, computed = flat.local[index], None if flat.is_sharded else flat.views[index]
        # What is updated may be a part of what is computed with, and is compared as that.
        if computed is not None and _storage(updated) == _storage(computed):
            yield _Held(name, -1, computed)
            continue
        if not isinstance(engine.schedule, ParameterServer):
            yield _Held(f"{name} as it is updated", engine.schedule.shard_index, updated)
        if computed is not None:
            yield _Held(f"{name} as it is computed with", -1, computed)


def _states(engine: Engine, optimizers: Sequence[Optimizer]) -> Iterator[_Held]:
    if isinstance(engine.schedule, ParameterServer):
        return
    flat = engine.program.parameters.flat
    for number, optimizer in enumerate(optimizers):
        what = type(optimizer).__name__ + (f" {number}" if len(optimizers) > 1 else "")
        for parameter, states in optimizer.state.items():
            index = flat.index_of.get(id(parameter))
            for name, state in states.items() if index is not None else ():
                if isinstance(state, Tensor) and index is not None:
                    shard = engine.schedule.shard_index if index in flat.local else -1
                    what_of = f"{flat.layout.slots[index].spec.name}'s {name} in {what}"
                    yield _Held(what_of, shard, plain_state(state))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _differ(told: Sequence[dict[str, int]]) -> list[str]:
    """Keys under which ranks have different values."""
    keys = dict.fromkeys(key for each in told for key in each)
    return [key for key in keys if len({each[key] for each in told if key in each}) > 1]


def _refuse(told: Sequence[dict[str, int]]) -> None:
    """Says which tensors differ, and on which ranks.

    Raises:
        EngineError: That.
    """
    lines: list[str] = []
    suspects: set[int] = set()
    keys = _differ(told)
    for key in keys:
        holders = {rank: each[key] for rank, each in enumerate(told) if key in each}
        (common, most), *others = Counter(holders.values()).most_common()
        odd = [rank for rank, value in holders.items() if value != common or any(count == most for _, count in others)]
        suspects.update(odd)
        if len(lines) < _NAMED:
            lines.append(f"{key.rpartition('/')[0]} on rank {', '.join(map(str, odd))}")
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    ranks = ", ".join(map(str, sorted(suspects)))
    raise EngineError(
        f"replicas differ: {'; '.join(lines)}{more}. A bit was flipped there, or that rank alone wrote to it, and "
        "training would drift apart: go on from a checkpoint of before (pl.load), and if no code of yours did so, have "
        f"the memory of rank {ranks} checked"
    )
