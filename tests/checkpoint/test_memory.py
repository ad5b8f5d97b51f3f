"""A checkpoint of a model that none of the ranks has the memory to hold is loaded all the same."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import paceline as pl
from paceline.checkpoint.ranges import Ranges
from paceline.engine.api import engine_of

LAYERS, WIDTH = 16, 1792
VALUES = [index + 1.0 for index in range(LAYERS)]
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4
"""196 MiB."""
LIMIT_BYTES = MODEL_BYTES * 6 // 10
"""What a rank may take beside what it has: its half of the model, and what reading takes."""


def stack(values: Sequence[float]) -> nn.Module:
    """Layers on the ranks' shards, each full of one value."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    value_of = dict(zip(model, values, strict=True))

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(value_of[module])

    return pl.parallelize(model, pl.Strategy(zero=3, bucket_mb=12), init=init)


def in_use() -> int:
    """The bytes of this process that RLIMIT_DATA counts."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def written(folder: Path) -> None:
    pl.save(folder / "step-00000001", stack(VALUES), step=1)


def loaded(folder: Path) -> tuple[list[tuple[float, float]], int, str]:
    """(least and greatest element of each shard, elements held, what a whole load says) under a limit."""
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use() + LIMIT_BYTES, unlimited[1]))
    try:
        model = stack([-1.0] * LAYERS)
        pl.load(folder, model)
        ranges = Ranges(engine_of(model))
        # Ranges are in the order in which gradients come, from the last layer.
        index_of = {name: index for index, name in enumerate(ranges.names)}
        shards = [ranges.local(index_of[f"{layer}.weight"]) for layer in range(LAYERS)]
        ends = [(float(shard.min()), float(shard.max())) if shard.numel() else (0.0, 0.0) for shard in shards]
        held = sum(shard.numel() for shard in shards)
        del model, ranges, shards, index_of
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use() + LIMIT_BYTES, unlimited[1]))
    told, whole = "", []
    try:
        for file in sorted(folder.glob("*/*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                whole += [tensors.get_tensor(name).clone() for name in tensors.keys()]  # noqa: SIM118
    except (RuntimeError, MemoryError, OSError) as error:
        told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)
    return ends, held, told


@pytest.mark.full
def test_a_model_larger_than_the_memory_of_each_rank_is_loaded(ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ranks(2, written, tmp_path)
    found = ranks(2, loaded, tmp_path)
    for layer in range(LAYERS):
        assert {end for ends, _, _ in found for end in ends[layer]} - {0.0} == {VALUES[layer]}
    assert sum(held for _, held, _ in found) * 4 == MODEL_BYTES
    assert all(told for _, _, told in found), "the limit lets a rank hold the whole model: it shows nothing"
