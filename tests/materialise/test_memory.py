"""Models on the meta device are made in the memory of a rank's shards and a unit or two."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import paceline as pl
from paceline.buffers.flat_parameters import FlatParameters
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.measuring.meters import held_bytes, watching_memory
from tests.engine.test_peak import MIB
from tests.quick import diagonal, full

# ---- memory

WIDTH, BLOCKS = 256, 8


class Wide(nn.Module):
    """A large tied embedding and blocks of two parameters."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS, words: int = 2 * WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight


class Live(TorchDispatchMode):
    """Adds up the bytes of tensors that were made inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out


def most_bytes(path: str | None) -> tuple[int, int, int]:
    """Bytes of tensors at most, of this rank's shards, and of the largest unit."""
    with torch.device("meta"):
        model = Wide()
    filled: list[int] = []
    assign_slots = FlatParameters.assign_slots

    def note(parameters: FlatParameters, schedule: Schedule) -> None:
        filled.append(live.most)
        assign_slots(parameters, schedule)

    # Then the engine takes what its steps need, to gather units in.
    with Live() as live, patch.object(FlatParameters, "assign_slots", note):
        pl.parallelize(model, Strategy(zero=3), weights=path)
    engine = pl.engine_of(model)
    sizes = [sum(engine.layout.slots[i].spec.numel * 4 for i in engine.layout.slots_of(u)) for u in engine.layout.units]
    shards = sum(buffer.bytes for buffer in engine.schedule.buffers() if buffer.kind in ("parameters", "master"))
    # What peers read is not allocated by torch.
    seen = filled[0] + (shards if engine.program.collectives is not None else 0)
    pl.release(model)
    return seen, shards, max(sizes)


@pytest.mark.parametrize(("n", "reads"), diagonal([2, 4], [True, False]))
def test_a_rank_never_holds_more_than_its_shards_and_twice_the_largest_unit(ranks, tmp_path, n, reads) -> None:
    path = str(tmp_path / "weights.safetensors") if reads else None
    if reads:
        tensors = {name: value for name, value in Wide().state_dict().items() if name != "head.weight"}
        save_file(tensors, str(path))
    for most, shards, largest in ranks(n, most_bytes, path):
        whole = 4 * sum(p.numel() for p in Wide().parameters())
        assert shards < whole / n + 4096 * n
        # One tensor at a time lies in the file, which is mapped: see the test below.
        mapped = 4 * 2 * WIDTH * WIDTH if reads else 0
        assert shards + largest < most < shards + 2 * largest + mapped + 16384


def held_at_most(paths: dict[int, str | None]) -> tuple[float, float]:
    """(measured, predicted) MiB that a rank takes at most to make the last of some models; by their blocks, weights."""
    cpu = torch.device("cpu")
    # The first is small: kernels and the C library take buffers of their own when they are first used.
    for blocks, path in paths.items():
        with torch.device("meta"):
            model = Wide(768, blocks, 768)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pl.barrier()
        base = held_bytes(cpu)
        with watching_memory(cpu) as most:
            pl.parallelize(model, Strategy(zero=3), weights=path)
            peak = most()
        kinds = ("parameters", "unsharded")
        held = sum(b.bytes for b in pl.engine_of(model).schedule.buffers() if b.kind in kinds)
        pl.barrier()
        pl.release(model)
    return (peak - base) / MIB, held / MIB


@pytest.mark.full
@pytest.mark.parametrize("reads", [full(False), True])
def test_the_memory_of_units_is_given_back(ranks, tmp_path: Path, reads) -> None:
    paths = {blocks: str(tmp_path / f"{blocks}.safetensors") if reads else None for blocks in (2, 12)}
    for blocks, path in paths.items():
        if path is not None:
            save_file({k: v for k, v in Wide(768, blocks, 768).state_dict().items() if k != "head.weight"}, path)
    for measured, held in ranks(2, held_at_most, paths):
        # All parameters take 56 MiB, those of a unit 4.5.
        assert held < 42
        assert measured < held + 9
