"""What saves and loads a training: paceline, and PyTorch's distributed checkpoints in several settings."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.measuring.cases import ADAMW, Case
from paceline.measuring.loops import loop

THREADS = (1, 2, 4)
"""Threads that DCP writes a rank's part with; 1 is its default."""
BACKGROUND, AT_ONCE = "in the background", "at once"


class Save(NamedTuple):
    """One that was begun."""

    is_done: Callable[[], bool]
    finish: Callable[[], object]


class System(NamedTuple):
    """A training that can be saved, on one rank."""

    name: str
    kind: str
    """`BACKGROUND` or `AT_ONCE`."""
    step: Callable[[], object]
    save: Callable[[Path], Save]
    load: Callable[[Path], object]


def systems(case: Case, world: pl.World, threads: Sequence[int]) -> list[System]:
    """All of them, paceline's first, of two trainings: paceline's and FSDP2's. DCP writes with so many threads each."""
    return [*_paceline(case, world), *_dcp(case, world, threads)]


def _paceline(case: Case, world: pl.World) -> list[System]:
    model = pl.parallelize(case.build(), Strategy(zero=3))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step = loop(model, optimizer, case, world, False)

    def save(background: bool, path: Path) -> Save:
        saving = pl.save(path, model, optimizer, step=1, background=background)
        return Save(lambda: saving.done, saving.wait)

    def load(path: Path) -> object:
        return pl.load(path, model, optimizer)

    return [
        System(f"paceline: zero 3, {kind}", kind, step, partial(save, kind == BACKGROUND), load)
        for kind in (BACKGROUND, AT_ONCE)
    ]


def _dcp(case: Case, world: pl.World, numbers: Sequence[int]) -> list[System]:
    """FSDP2's shards; in the background staged into memory that is kept, and written by a thread or a process."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Its process is started by a rank, which is itself one that multiprocessing lets start none; it ends with the rank.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    model = case.build()
    mesh = init_device_mesh("cpu", (world.world_size,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step = loop(model, optimizer, case, world, False)
    # Its thread communicates beside training, which must not share its group.
    group = dist.new_group(backend="gloo")
    # A process reads what is staged in memory that it shares.
    stagers = {
        kind: DefaultStager(StagingOptions(False, kind is AsyncCheckpointerType.PROCESS, False, False))
        for kind in AsyncCheckpointerType
    }

    def states() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def begin(kind: AsyncCheckpointerType, threads: int, path: Path) -> Save:
        told: Any = dcp.async_save(
            states(),
            storage_writer=dcp.FileSystemWriter(path, thread_count=threads),
            async_checkpointer_type=kind,
            async_stager=stagers[kind],
            process_group=group,
        )
        future = getattr(told, "upload_completion", told)
        return Save(future.done, future.result)

    def save(threads: int, path: Path) -> Save:
        dcp.save(states(), storage_writer=dcp.FileSystemWriter(path, thread_count=threads), process_group=group)
        return Save(lambda: True, lambda: None)

    def load(path: Path) -> None:
        found = states()
        dcp.load(found, storage_reader=dcp.FileSystemReader(path), process_group=group)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    found = []
    for threads in numbers:
        by = f"{threads} writing thread{'s' * (threads > 1)}"
        for kind in AsyncCheckpointerType:
            name = f"torch DCP: async_save by a {kind.value}, {by}"
            found.append(System(name, BACKGROUND, step, partial(begin, kind, threads), load))
        found.append(System(f"torch DCP: save, {by}", AT_ONCE, step, partial(save, threads), load))
    return found
