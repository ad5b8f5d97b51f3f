"""`paceline bench trainer`: the trainer's step over N ranks against a plain single-process loop, on the same text."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from functools import partial

import torch

import paceline as pl
from paceline.bench.model import PlainGPT
from paceline.bench.ranks import run_ranks
from paceline.command_line.json_file import JsonFile
from paceline.data import DataConfig, prepare
from paceline.data.loader import Loader
from paceline.measuring.results import Row, make_row, print_rows, write_json
from paceline.models.config import ModelConfig
from paceline.models.presets import preset
from paceline.models.transformer import Transformer
from paceline.train.optim import Update
from paceline.train.sections import OptimConfig


@dataclass(frozen=True)
class TrainerBench:
    """Steps of the trainer with one thread a rank, against a plain loop in one process with as many threads."""

    presets: tuple[str, ...] = ("tiny", "small")
    """Model presets to train."""
    ranks: int = 2
    """Ranks of the trainer, and threads of the plain loop."""
    batch: int = 8
    """Samples in the global batch, the same for both."""
    rounds: int = 12
    """Rounds; in each, both run in turn."""
    steps: int = 8
    """Steps of each in one round."""
    json: JsonFile = ""
    """Where to write machine, versions, command and rows; - prints them, and all else goes to stderr."""


def main(options: TrainerBench) -> list[Row]:
    """Runs the benchmark, prints its table and writes its file."""
    rows: list[Row] = []
    for name in options.presets:
        model = preset(name)
        ours, plain, peaks, wire = run_ranks(options.ranks, _measure, model, options)[0]
        threads = f"one process, {options.ranks} threads"
        rows.append(make_row(name, "plain loop", threads, 1, plain, plain, peaks, 0))
        rows.append(make_row(name, "paceline", "one thread a rank", options.ranks, ours, plain, peaks, wire))
        tokens = options.batch * model.context
        for row in rows[-2:]:
            print(f"{name}: {row.system}, {row.setting}: {tokens / row.median_ms * 1e3:,.0f} tokens/s")
    print_rows(rows, "the plain loop")
    if options.json:
        write_json(options.json, rows)
    return rows


def _measure(config: ModelConfig, options: TrainerBench) -> tuple[list[float], list[float], int, int]:
    """Seconds a step of both in each round, peak memory of the process that ran both, bytes sent in a step."""
    world = pl.init()
    corpus = prepare(DataConfig())
    ours: list[float] = []
    plain: list[float] = []
    steps = (options.rounds + 1) * options.steps
    torch.manual_seed(0)
    model = pl.parallelize(Transformer(config), pl.Strategy(gradients="sum"))
    engine, update = pl.engine_of(model), Update(model, OptimConfig(), steps, world.device)
    reference = PlainGPT(config)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    load = partial(
        Loader, corpus.train, context=config.context, batch_size=options.batch, micro_batch=options.batch, seed=0
    )
    with load(rank=world.rank, world_size=world.world_size) as mine, load() as whole:
        for number in range(options.rounds + 1):
            pl.barrier()
            start = time.perf_counter()
            for step in range(options.steps):
                for batch in pl.accumulate(model, next(mine)):
                    loss = model(batch.inputs, batch.targets)
                    engine.count(batch.tokens, loss)
                    loss.backward()
                tokens, nats = engine.counts()
                update(number * options.steps + step, tokens, nats, engine.grad_norm())
            ours.append((time.perf_counter() - start) / options.steps)
            pl.barrier()
            if world.rank == 0:
                torch.set_num_threads(options.ranks)
                start = time.perf_counter()
                for _ in range(options.steps):
                    for batch in next(whole):
                        (reference(batch.inputs, batch.targets) / batch.tokens).backward()
                    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                plain.append((time.perf_counter() - start) / options.steps)
                torch.set_num_threads(1)
    last = [event for event in engine.drain_events() if event.step == engine.state.step]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pl.release(model)
    pl.shutdown()
    # The first round warms up.
    return ours[1:], plain[1:], peak, sum(event.sent for event in last)
