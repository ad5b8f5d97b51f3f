"""The experiments between slow hosts, as each rank runs them under torchrun.

Rank 0 writes JSON lines to its output: {"progress": words}, and what was timed.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import paceline as pl
from paceline.bench.network.rows import wire_seconds
from paceline.bench.network.turns import Contestant, Timed, say, take_turns
from paceline.bench.peers import peers
from paceline.comm.connect import open_transport
from paceline.comm.cpu.codecs import BLOCK, CODECS
from paceline.core.collectives.rounds import chunk
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.measuring.cases import Case, System
from paceline.measuring.loops import one_process, parallel
from paceline.models.config import ModelConfig
from paceline.models.flops import parameter_count

SIZES = {"100 KiB": 100 << 10, "1 MiB": 1 << 20, "10 MiB": 10 << 20, "25 MiB": 25 << 20}
"""Bytes of the buffers that collectives are timed with."""

TURN_SECONDS = 0.1
"""How long the calls of one turn should keep the wire busy at least: a single short one is hard to time."""

DDP = "torch DDP: views, static graph"
"""Which of the settings of torch's DDP runs beside; its bucket is 25 MiB."""

BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
"""Sizes of the sweep in MiB."""

SHAPES = tuple(
    ModelConfig(layers=6, width=width, heads=width // 64, context=16, vocabulary=2048) for width in range(64, 513, 64)
)
"""The models to choose from: the largest takes 5 GB for all systems of two ranks."""

SILENCE_SECONDS = 120.0
"""After which a rank gives its peers up."""


@dataclass(frozen=True)
class Job:
    """What the ranks of one job do."""

    experiment: str
    """Key of EXPERIMENTS."""
    hosts: int
    ranks_per_host: int
    rate: float
    """Bytes a second that a link was measured to carry each way."""
    rounds: int
    step_seconds: float = 0.6
    """About how long the gradients of a training step should keep the wire busy; the model is chosen for it."""


GLOO: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all_reduce": lambda whole, own: dist.all_reduce(whole),
    "reduce_scatter": lambda whole, own: dist.reduce_scatter_tensor(own, whole),
    "all_gather": lambda whole, own: dist.all_gather_into_tensor(whole, own),
}
"""Gloo's collectives, of a whole buffer and a rank's own part of it, which Gloo keeps elsewhere."""


def exchanges(job: Job, world: pl.World, names: Sequence[str]) -> list[Timed]:
    """Collectives of buffers of every size: Gloo's, and paceline's by each name in `names`, such as "all_reduce/ring".

    A reduce-scatter or an all-gather is half an all-reduce, and has half as much to send.
    """
    transport = open_transport(world)
    found = []
    for size_name, size in SIZES.items():
        say(world, size_name)
        elements = size // 4
        first, end = chunk(world.rank, world.world_size, elements)
        ours, theirs = transport.allocate(elements, torch.float32), torch.zeros(elements)
        part = torch.zeros(end - first)
        contestants = []
        for op, chosen in itertools.groupby(names, key=lambda name: name.partition("/")[0]):
            sends = size if op == "all_reduce" else size / 2
            contestants.append(Contestant("Gloo", op, sends, partial(GLOO[op], theirs, part)))
            check(contestants[-1], op, theirs, part, world)
            for name in chosen:
                run = partial(transport.run, name, ours, size_name)
                contestants.append(Contestant("paceline", f"{name} over {transport.name}", sends, run))
                check(contestants[-1], op, ours, ours[first:end], world)
        calls = max(1, round(TURN_SECONDS / wire_seconds(job.hosts, size, job.rate)))
        found += take_turns(world, size_name, contestants, job.rounds, calls)
    transport.close()
    return found


def check(contestant: Contestant, op: str, whole: torch.Tensor, own: torch.Tensor, world: pl.World) -> None:
    """Sees that a call gives what it should; it warms up too, and leaves zeros, which stay what they are.

    Raises:
        AssertionError: It does not.
    """
    for tensor in (whole, own):
        tensor.fill_(world.rank + 1)
    contestant.call()
    ranks = torch.arange(1, world.world_size + 1, dtype=torch.float32)
    found = {"all_reduce": whole, "reduce_scatter": own, "all_gather": whole.view(world.world_size, -1)}[op]
    expected = ranks.view(-1, 1) if op == "all_gather" else ranks.sum()
    if not bool((found == expected).all()):
        raise AssertionError(f"{contestant.system}, {contestant.setting}: expected {expected} everywhere, got {found}")
    for tensor in (whole, own):
        tensor.zero_()


def trainings(job: Job, world: pl.World, strategies: Mapping[str, Strategy], beside_ddp: bool = False) -> list[Timed]:
    """Steps of a model whose computing and wire time are about equal, with each strategy; computing alone first."""
    case = balanced_case(job, world)
    size = 4 * parameter_count(case.model)
    on_wire = {name: size * wire_share(strategy) for name, strategy in strategies.items()}
    alone = Contestant("one process", "no communication", 0, one_process(case, world, "float32").step)
    systems = [System("paceline", name, partial(parallel, strategy), ()) for name, strategy in strategies.items()]
    systems += [peer for peer in peers("float32") if beside_ddp and peer.label == DDP]
    contestants = [alone]
    for one in systems:
        training = one.build(case, world, "float32")
        sends = on_wire.get(one.setting, size)
        contestants.append(Contestant(one.name, one.setting, sends, training.step, training.settle))
    # Several steps a turn, as what follows an update runs into the next one.
    timed = take_turns(world, case.name, contestants, job.rounds, calls=4, progress=True)
    return [replace(one, compute=timed[0].seconds) for one in timed]


def wire_share(strategy: Strategy) -> float:
    """Bytes of a step on the wire, as a share of an fp32 all-reduce's: gradients one way, sums or weights the other."""
    share = {"full": 1.0, "bfloat16": 0.5, "int8": CODECS["int8"].size(BLOCK) / (4 * BLOCK)}[strategy.wire]
    return share if strategy.stage == 0 else (share + 1) / 2


def balanced_case(job: Job, world: pl.World) -> Case:
    """The model of SHAPES whose gradients take closest to `job.step_seconds` on the wire, with as much to compute.

    Computing takes a + b x batch: both are measured, while all ranks are at work.
    """
    each = wire_seconds(job.hosts, 1, job.rate)
    model = min(SHAPES, key=lambda shape: abs(4 * parameter_count(shape) * each - job.step_seconds))
    wire = 4 * parameter_count(model) * each
    batches = (8, 24)
    alone = [
        Contestant("", str(batch), 0, one_process(Case("", model, batch), world, "float32").step) for batch in batches
    ]
    few, many = (statistics.median(timed.seconds) for timed in take_turns(world, "", alone, rounds=5, calls=1))
    slope = (many - few) / (batches[1] - batches[0])
    batch = max(1, round(batches[0] + (wire - few) / slope)) if slope > 0 else batches[0]
    return Case(
        f"{parameter_count(model) / 1e6:.1f} M parameters, {batch} x {model.context} tokens a rank", model, batch
    )


EXPERIMENTS: dict[str, Callable[[Job, pl.World], list[Timed]]] = {
    "all-reduce": partial(exchanges, names=["all_reduce"]),
    "systems": partial(trainings, strategies=SYSTEMS, beside_ddp=True),
    "buckets": partial(trainings, strategies={f"{size:g} MiB": Strategy(bucket_mb=size) for size in BUCKETS}),
    "stages": partial(
        trainings,
        strategies={
            f"zero {stage}, {size:g} MiB": Strategy(zero=stage, bucket_mb=size)  # type: ignore[arg-type]
            for stage, size in ((0, 2.5), (1, 1.0), (1, 2.5), (1, 5.0), (2, 2.5))
        },
        beside_ddp=True,
    ),
    "wire": partial(
        trainings,
        strategies={
            f"zero {stage}, {wire} wire": Strategy(zero=stage, wire=wire)  # type: ignore[arg-type]
            for stage in (0, 1)
            for wire in ("full", *CODECS)
        },
    ),
    "hierarchical": partial(
        exchanges,
        names=[
            f"{collective}/{algorithm}"
            for collective in ("all_reduce", "reduce_scatter", "all_gather")
            for algorithm in ("direct", "ring", "hierarchical")
        ],
    ),
}
"""What the ranks do in each experiment."""


@record
def main(job: Job) -> None:
    """Joins torchrun's job, runs its experiment and lets rank 0 write what was timed; torchrun reports an error."""
    world = pl.init("cpu", timeout=SILENCE_SECONDS)
    timed = EXPERIMENTS[job.experiment](job, world)
    if world.rank == 0:
        for one in timed:
            print(json.dumps(asdict(one)), flush=True)
    pl.shutdown()


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
