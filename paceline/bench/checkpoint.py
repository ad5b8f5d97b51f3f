"""`paceline bench checkpoint`: what saving costs a training, and how fast loading is, beside PyTorch's own."""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import paceline as pl
from paceline.bench.cases import ADAMW, Case
from paceline.bench.loops import loop
from paceline.bench.progress import progress
from paceline.bench.ranks import run_ranks
from paceline.bench.results import half_spread, write_json
from paceline.command_line.json_file import JsonFile
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.models.config import ModelConfig

_WIDTH, _VOCABULARY = 512, 2048
_STEPS = 4
"""Of which the usual time of a step is taken, before each save."""
_PIECE = 16 << 20
"""Bytes that are read at once where nothing is checked."""


@dataclass(frozen=True)
class CheckpointBench:
    """Time that saving takes from a training, and bandwidth of loading, beside PyTorch's distributed checkpoints."""

    ranks: int = 2
    """Ranks of the job, on this machine; they share the cores."""
    mb: int = 400
    """Megabytes of parameters and of AdamW's states, over all ranks."""
    rounds: int = 8
    """Rounds; in each, every system saves and loads in turn."""
    folder: str = ""
    """Where checkpoints are written, a few times as large as that; default: the temporary folder."""
    json: JsonFile = ""
    """Where to write machine, versions, command and figures; - prints them, and all else goes to stderr."""


@dataclass(frozen=True)
class Saved:
    """How one system fared; medians over rounds of the slowest rank's time, half the distance between the quartiles.

    Attributes:
        system: Its name.
        bytes: On the disk.
        stall_ms: Until the call that begins a save in the background has returned.
        stall_spread_ms: Of that.
        lost_ms: What a save costs the training until it is written: the time of all steps meanwhile beyond the usual.
        lost_spread_ms: Of that.
        load_seconds: To load it again, checksums included where there are any.
        load_spread: Of that.
        bandwidth: Bytes a second of loading.
        of_page_cache: Share of what reading the same bytes into memory gives, nothing checked, in the same round.
        of_page_cache_spread: Of that.
    """

    system: str
    bytes: int
    stall_ms: float
    stall_spread_ms: float
    lost_ms: float
    lost_spread_ms: float
    load_seconds: float
    load_spread: float
    bandwidth: float
    of_page_cache: float
    of_page_cache_spread: float


class _Save(NamedTuple):
    is_done: Callable[[], bool]
    finish: Callable[[], object]


class _System(NamedTuple):
    """A training that can be saved, on one rank."""

    step: Callable[[], object]
    save: Callable[[Path], _Save]
    load: Callable[[Path], object]


class _Times(NamedTuple):
    """Of one round, in seconds."""

    stall: float
    lost: float
    load: float
    read: float
    size: int


def main(options: CheckpointBench) -> list[Saved]:
    """Runs the benchmark, prints its table and writes its file.

    Raises:
        UserError: An option makes no sense.
    """
    if options.ranks < 1 or options.mb < 1 or options.rounds < 1:
        raise UserError("bench checkpoint: expected ranks, mb and rounds of 1 or more")
    layers = max(1, round((options.mb * 1e6 / 12 - _WIDTH * _VOCABULARY) / (12 * _WIDTH**2)))
    shape = ModelConfig(layers=layers, width=_WIDTH, heads=8, context=64, vocabulary=_VOCABULARY)
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    parent = Path(options.folder).expanduser() if options.folder else None
    with TemporaryFolder("bench") as folder, progress() as report:
        report(f"{len(_SYSTEMS)} systems by turns, {options.rounds} rounds")
        path = folder.path if parent is None else parent / folder.path.name
        try:
            case = Case("checkpoint", shape, batch=1)
            measured = run_ranks(options.ranks, _measure, case, path, options.rounds, threads=threads)[0]
        finally:
            shutil.rmtree(path, ignore_errors=True)
    rows = [_row(system, [_Times(*times) for times in each]) for system, each in measured.items()]
    _print(rows)
    if options.json:
        write_json(options.json, rows)
    return rows


def _measure(case: Case, folder: Path, rounds: int) -> dict[str, list[_Times]]:
    world = pl.init(device="cpu")
    systems = {name: build(case, world) for name, build in _SYSTEMS.items()}
    found: dict[str, list[_Times]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times = _round(systems[name], folder / f"{names.index(name)}-{number}", world)
            if number:  # the first round warms up, and makes the optimizers' states
                found[name].append(times)
    pl.shutdown()
    return found


def _round(system: _System, path: Path, world: pl.World) -> _Times:
    for _ in range(2):
        _all_done(system, lambda: False)
    began = time.perf_counter()
    for _ in range(_STEPS):
        _all_done(system, lambda: False)
    usual = (time.perf_counter() - began) / _STEPS
    pl.barrier()
    began = time.perf_counter()
    saving = system.save(path)
    stall = time.perf_counter() - began
    steps = 1
    while not _all_done(system, saving.is_done):
        steps += 1
    lost = time.perf_counter() - began - steps * usual
    saving.finish()
    pl.barrier()
    own = [file for number, file in enumerate(sorted(path.iterdir())) if number % world.world_size == world.rank]
    read = _seconds(partial(_read, own))
    load = _seconds(partial(system.load, path))
    size = sum(file.stat().st_size for file in path.iterdir())
    pl.barrier()
    if world.rank == 0:
        shutil.rmtree(path)
    told = pl.all_gather_json([stall, lost, load, read], "seconds")
    stall, lost, load, read = (max(each) for each in zip(*told, strict=True))
    return _Times(stall, lost, load, read, size)


def _all_done(system: _System, is_done: Callable[[], bool]) -> bool:
    """Trains a step; whether every rank was done with its part of a save after it."""
    system.step()
    return all(pl.all_gather_json(is_done(), "whether it is saved"))


def _seconds(work: Callable[[], object]) -> float:
    pl.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _read(files: list[Path]) -> None:
    """Reads this rank's share of a checkpoint into memory that is new, as what is loaded is."""
    for file in files:
        data = torch.empty(file.stat().st_size, dtype=torch.uint8).numpy().data
        with file.open("rb", buffering=0) as raw:
            for start in range(0, len(data), _PIECE):
                raw.readinto(data[start : start + _PIECE])


def _paceline(case: Case, world: pl.World) -> _System:
    model = pl.parallelize(case.build(), Strategy(zero=3))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def save(path: Path) -> _Save:
        saving = pl.save(path, model, optimizer, step=1, background=True)
        return _Save(lambda: saving.done, saving.wait)

    return _System(loop(model, optimizer, case, world, False), save, lambda path: pl.load(path, model, optimizer))


def _dcp(case: Case, world: pl.World) -> _System:
    """FSDP2's shards; staged into memory that is kept from one save to the next, and written by a thread."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    model = case.build()
    mesh = init_device_mesh("cpu", (world.world_size,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    # Its thread communicates beside training, which must not share its group.
    group = dist.new_group(backend="gloo")

    def states() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def save(path: Path) -> _Save:
        writer = dcp.FileSystemWriter(path)
        told: Any = dcp.async_save(states(), storage_writer=writer, async_stager=stager, process_group=group)
        future = getattr(told, "upload_completion", told)
        return _Save(future.done, future.result)

    def load(path: Path) -> None:
        found = states()
        dcp.load(found, storage_reader=dcp.FileSystemReader(path), process_group=group)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return _System(loop(model, optimizer, case, world, False), save, load)


_SYSTEMS: dict[str, Callable[[Case, pl.World], _System]] = {
    "paceline: zero 3, pl.save in the background": _paceline,
    "torch DCP: FSDP2, async_save by a thread": _dcp,
}


def _row(system: str, rounds: list[_Times]) -> Saved:
    stalls, lost = ([1e3 * each for each in column] for column in ([t.stall for t in rounds], [t.lost for t in rounds]))
    loads, shares = [each.load for each in rounds], [each.read / each.load for each in rounds]
    load = statistics.median(loads)
    return Saved(
        system=system,
        bytes=rounds[-1].size,
        stall_ms=statistics.median(stalls),
        stall_spread_ms=half_spread(stalls),
        lost_ms=statistics.median(lost),
        lost_spread_ms=half_spread(lost),
        load_seconds=load,
        load_spread=half_spread(loads),
        bandwidth=rounds[-1].size / load,
        of_page_cache=statistics.median(shares),
        of_page_cache_spread=half_spread(shares),
    )


def _print(rows: list[Saved]) -> None:
    print(f"{'':<46}{'MB':>6}  {'stall, ms':>14}  {'lost in all, ms':>16}  {'load, s':>13}  {'GB/s':>5}  of page cache")
    for row in rows:
        print(
            f"{row.system:<46}{row.bytes / 1e6:6.0f}  {row.stall_ms:7.1f} +- {row.stall_spread_ms:<4.1f}  "
            f"{row.lost_ms:9.0f} +- {row.lost_spread_ms:<4.0f}  {row.load_seconds:5.2f} +- {row.load_spread:<4.2f}  "
            f"{row.bandwidth / 1e9:5.2f}  {row.of_page_cache:.2f} +- {row.of_page_cache_spread:.2f}"
        )
