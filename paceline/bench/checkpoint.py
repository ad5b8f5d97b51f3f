"""`paceline bench checkpoint`: what saving costs a training, and how fast loading is, beside PyTorch's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import paceline as pl
from paceline.bench.checkpoint_systems import AT_ONCE, THREADS, System, systems
from paceline.bench.ranks import run_ranks
from paceline.bench.subject_line import progress
from paceline.command_line.json_file import JsonFile
from paceline.core.errors import UserError
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.measuring.cases import Case
from paceline.measuring.results import half_spread, write_json
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
        stall_ms: Until the call that saves, or begins to, has returned.
        stall_spread_ms: Of that.
        lost_ms: What a save costs the training until it is written: the time of all steps meanwhile beyond the usual.
        lost_spread_ms: Of that.
        load_seconds: To load it again, checksums included where there are any.
        load_spread: Of that.
        bandwidth: Bytes a second of loading.
        of_page_cache: Share of what reading the same bytes into memory gives, nothing checked, in the same round.
        of_page_cache_spread: Of that.
        kind: Whether the call returns when the checkpoint counts, or before.
        stall_ratio: paceline's stall of that kind as a share of this one's.
        lost_ratio: The same of what is lost in all.
        load_ratio: The same of the time to load.
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
    kind: str
    stall_ratio: float = 1.0
    lost_ratio: float = 1.0
    load_ratio: float = 1.0


class _Times(NamedTuple):
    """Seconds of one round."""

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
        report(f"paceline and DCP in {3 * len(THREADS)} settings by turns, {options.rounds} rounds")
        path = folder.path if parent is None else parent / folder.path.name
        try:
            case = Case("checkpoint", shape, batch=1)
            measured = run_ranks(options.ranks, _measure, case, path, options.rounds, THREADS, threads=threads)[0]
        finally:
            shutil.rmtree(path, ignore_errors=True)
    rows = _rows([(system, kind, [_Times(*times) for times in each]) for system, kind, each in measured])
    _print(rows)
    if options.json:
        write_json(options.json, rows)
    return rows


def _measure(case: Case, folder: Path, rounds: int, threads: Sequence[int]) -> list[tuple[str, str, list[_Times]]]:
    world = pl.init(device="cpu")
    with _quiet():
        every = systems(case, world, threads)
        found: list[list[_Times]] = [[] for _ in every]
        for number in range(rounds + 1):
            for place in range(len(every)):
                index = (place + number) % len(every)
                times = _round(every[index], folder / f"{index}-{number}", world)
                if number:  # the first round warms up, and makes the optimizers' states
                    found[index].append(times)
    pl.shutdown()
    return [(system.name, system.kind, times) for system, times in zip(every, found, strict=True)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is said on stderr inside, nor by processes that are started there: DCP's tells of every save."""
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _round(system: System, path: Path, world: pl.World) -> _Times:
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


def _all_done(system: System, is_done: Callable[[], bool]) -> bool:
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


def _rows(measured: list[tuple[str, str, list[_Times]]]) -> list[Saved]:
    """A row for each system, beside paceline's of its kind, which comes first."""
    rows = [_row(*each) for each in measured]
    first = {row.kind: row for row in reversed(rows)}
    return [
        replace(
            row,
            stall_ratio=first[row.kind].stall_ms / row.stall_ms,
            lost_ratio=first[row.kind].lost_ms / row.lost_ms,
            load_ratio=first[row.kind].load_seconds / row.load_seconds,
        )
        for row in sorted(rows, key=lambda row: row.kind == AT_ONCE)
    ]


def _row(system: str, kind: str, rounds: list[_Times]) -> Saved:
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
        kind=kind,
    )


def _print(rows: list[Saved]) -> None:
    print(
        f"{'':<59}{'MB':>4}  {'stall, ms':>14}  {'lost in all, ms':>14}  {'load, s':>12}  {'GB/s':>5}  of page cache  "
        "paceline's stall, lost, load"
    )
    for row in rows:
        print(
            f"{row.system:<59}{row.bytes / 1e6:4.0f}  {row.stall_ms:7.1f} +- {row.stall_spread_ms:<4.1f}  "
            f"{row.lost_ms:7.0f} +- {row.lost_spread_ms:<4.0f}  {row.load_seconds:4.2f} +- {row.load_spread:<4.2f}  "
            f"{row.bandwidth / 1e9:5.2f}  {row.of_page_cache:.2f} +- {row.of_page_cache_spread:.2f}   "
            f"{row.stall_ratio:.2f}, {row.lost_ratio:.2f}, {row.load_ratio:.2f}"
        )
