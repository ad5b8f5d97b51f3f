"""A step's time in closed form, for runs that the engine's schedule does not describe: other programs', and those with
tensor or pipeline ranks. The seconds of operations and collectives are those of every other forecast. Pure.

Blocks are alike, so a step is sums and maxima of a few numbers: with sharded parameters a block takes what it computes
or what is moved beside it, whichever is longer, with the first gather and the last reduction on their own (one unit is
prefetched); with pipeline stages m micro-batches take m times the slowest stage and the others once, to fill and to
drain (Narayanan et al. 2021); tensor ranks exchange the residual stream twice in each pass of a block (Shoeybi et al.
2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.models.flops import parameter_count
from paceline.plan import network
from paceline.plan.costs import OPTIMIZER_BYTES
from paceline.plan.hardware import Hardware
from paceline.plan.kernels import seconds, total
from paceline.plan.run import Run
from paceline.plan.transformer_work import ITEMSIZE, transformer_work
from paceline.plan.work import Operation, UnitWork


@dataclass(frozen=True)
class StepTime:
    """Where a step's seconds go.

    Attributes:
        compute: Forward and backward, with what is computed again.
        gather: Waiting for parameters.
        reduce: Waiting for gradients to be reduced.
        tensor: Exchanging activations between tensor ranks.
        send: Sending activations from stage to stage.
        bubble: Stages that wait for others.
        optimizer: The update.
        straggling: Waiting for the slowest of many ranks.
    """

    compute: float
    gather: float = 0.0
    reduce: float = 0.0
    tensor: float = 0.0
    send: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    straggling: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return (
            self.compute
            + self.gather
            + self.reduce
            + self.tensor
            + self.send
            + self.bubble
            + self.optimizer
            + self.straggling
        )


@dataclass(frozen=True)
class _Block:
    """Seconds of one block in one micro-batch."""

    forward: float
    backward: float
    tensor_forward: float
    tensor_backward: float


def step_time(run: Run, hardware: Hardware) -> StepTime:
    """Seconds of a step of a run, by where they go.

    Raises:
        UserError: The device does not compute in the run's precision.
    """
    config = run.config
    work = transformer_work(
        config,
        run.samples,
        dtype=run.dtype,
        software=run.software,
        tensor=run.tensor,
        sequence_parallel=run.sequence_parallel,
        context_ranks=run.context_ranks,
    )
    units = {unit.unit: unit for unit in work.units}
    block = _block(run, units["blocks.0"], hardware)
    ends = {
        name: (total(unit.forward, hardware), total(unit.backward, hardware))
        for name, unit in units.items()
        if not name.startswith("blocks.")
    }
    first, last = sum(ends["embedding"]), sum(ends["norm"]) + sum(ends["head"])
    layers = config.layers / run.pipeline
    each = layers * (block.forward + block.backward)
    m = run.micro_batches
    tensor = layers * (block.tensor_forward + block.tensor_backward)
    sent = _sent(run, hardware)
    mean = each + (first + last) / run.pipeline
    adding = _parameters(run) * run.added / (hardware.device.bandwidth * hardware.kernels.memory_efficiency)
    compute = m * (mean + adding)
    waited = 0.0 if run.overlap_sent else sent
    stage = each + tensor + sent + adding
    slowest = stage - sent + waited + (max(first, last) if run.pipeline > 1 else first + last)
    others = (run.pipeline - 1) * stage + (min(first, last) if run.pipeline > 1 else 0.0)
    whole = m * slowest + others / run.chunks
    # With stages parameters stay gathered, and gradients add up, from a step's first micro-batch to its last.
    each_time = run.zero >= 2 and run.pipeline == 1
    moved = _sharded(run, block, hardware) if each_time else _replicated(run, block, hardware)
    gather, reduce = moved
    optimizer = _optimizer(run, hardware)
    plain = whole + gather + reduce + optimizer
    hosts = math.ceil(run.devices / hardware.devices_per_host)
    straggling = plain * hardware.kernels.straggling * math.log2(hosts)
    bubble = whole - compute - m * (tensor + waited)
    return StepTime(compute, gather, reduce, m * tensor, m * waited, bubble, optimizer, straggling)


def _block(run: Run, unit: UnitWork, hardware: Hardware) -> _Block:
    moved = _exchanged(run, hardware)
    forward, tensor_forward = _pass(run, unit.forward, moved, hardware)
    # Of backward's exchanges half gather, the other half reduce: sums of several products where these are separate,
    # which no single matmul then hides (TorchInductor's micro_pipeline_tp.py).
    beside = 0.5 if run.software.separate else 1.0
    backward, tensor_backward = _pass(run, unit.backward, moved, hardware, beside)
    again = tensor_again = 0.0
    if run.recompute == "unit":
        again, tensor_again = forward * run.recompute_share, tensor_forward * run.recompute_share
    elif run.recompute == "attention":
        again = sum(seconds(op, hardware) for op in unit.forward if op.kind == "attention" or op.shape[0] > 1)
    elif run.recompute == "operations":
        shares = {"matmul": 0.5, "attention": 0.0, "memory": 1.0}
        again = sum(shares[op.kind] * seconds(op, hardware) for op in unit.forward)
    return _Block(forward, backward + again, tensor_forward, tensor_backward + tensor_again)


def _pass(
    run: Run, operations: tuple[Operation, ...], moved: float, hardware: Hardware, beside: float = 1.0
) -> tuple[float, float]:
    """Seconds of a block's pass, and those that exchanging `moved` seconds' worth of activations adds to them.

    Where exchanges overlap, a share `beside` of them has a matmul to hide behind.
    """
    computing = total(operations, hardware)
    if run.overlap_tensor:
        # In pieces of one rank's part each: the first has nothing to hide behind.
        matmuls = sum(seconds(op, hardware) for op in operations if op.kind == "matmul")
        hidden = beside * moved
        moved += hidden / run.tensor - min(hidden, matmuls)
    # Where the host is behind, the device exchanges while it would wait for work.
    return computing, max(0.0, sum(seconds(op, hardware) for op in operations) + moved - computing)


def _exchanged(run: Run, hardware: Hardware) -> float:
    """Seconds of exchanges in a block's forward: tensor ranks the stream, twice; context ranks keys and values."""
    config = run.config
    tokens = run.samples * config.context // run.context_ranks
    stream = tokens * config.width * ITEMSIZE[run.dtype]
    group = network.spread(run.tensor, hardware.devices_per_host)
    if run.sequence_parallel:
        # What is multiplied in 8 bits is cast before it is gathered.
        cast = run.dtype == "float8" and not run.software.row_scales
        gathered = network.seconds("all_gather", stream / 2 if cast else stream, group, hardware)
        tensor = 2 * (gathered + network.seconds("reduce_scatter", stream, group, hardware))
    else:
        tensor = 2 * network.seconds("all_reduce", stream, group, hardware)
    if run.context_ranks > 1:
        ring = network.spread(run.context_ranks, hardware.devices_per_host, run.tensor)
        both = 2 * config.key_value_heads * config.head_width / run.tensor * ITEMSIZE[run.dtype]
        tensor += network.seconds("all_gather", tokens * run.context_ranks * both, ring, hardware)
    return tensor


def _sent(run: Run, hardware: Hardware) -> float:
    """Seconds in which a stage sends a micro-batch on and its gradient back."""
    if run.pipeline == 1:
        return 0.0
    tokens = run.samples * run.config.context // run.context_ranks
    whole = tokens * run.config.width * ITEMSIZE[run.dtype]
    size = whole / run.tensor if run.sequence_parallel or run.sends_parts else whole
    apart = run.devices // run.pipeline >= hardware.devices_per_host
    hop = network.Spread(1, 2) if apart else network.Spread(2, 1)
    sent = network.seconds("point_to_point", size, hop, hardware)
    if run.sends_parts and not run.sequence_parallel:
        sent += network.seconds("all_gather", whole, network.spread(run.tensor, hardware.devices_per_host), hardware)
    return 2 * run.chunks * sent


def _parameters(run: Run) -> float:
    """Parameters on one rank before data-parallel ranks divide them."""
    return parameter_count(run.config) / (run.tensor * run.pipeline)


def _optimizer(run: Run, hardware: Hardware) -> float:
    updated = _parameters(run) / run.shards
    return updated * OPTIMIZER_BYTES / (hardware.device.bandwidth * hardware.kernels.memory_efficiency)


def _groups(run: Run, hardware: Hardware) -> tuple[network.Spread, network.Spread]:
    """Where the ranks are that hold a copy between them, and those that hold the same shards."""
    shards = run.shards
    return (
        network.spread(shards, hardware.devices_per_host, run.tensor),
        network.spread(run.copies // shards, hardware.devices_per_host, run.tensor * shards),
    )


def _sharded(run: Run, block: _Block, hardware: Hardware) -> tuple[float, float]:
    """Seconds in which computing waits for sharded parameters, and for gradients."""
    shards, replicas = _groups(run, hardware)
    layers = run.config.layers / run.pipeline
    parameters = _parameters(run)
    per_block = _block_parameters(run) / run.tensor
    rest = max(0.0, parameters - layers * per_block)

    def gathered(count: float, over: Hardware = hardware) -> float:
        return network.seconds("all_gather", count * run.gathered, shards, over)

    def reduced(count: float, over: Hardware = hardware) -> float:
        scattered = network.seconds("reduce_scatter", count * run.reduced, shards, over)
        between = network.seconds("all_reduce", count * run.reduced / shards.ranks, replicas, over)
        return scattered + between / run.micro_batches

    gather, reduce = gathered(per_block), reduced(per_block)
    passing = network.unhindered(hardware)
    gather_passes, reduce_passes = gathered(per_block, passing), reduced(per_block, passing)
    forward, backward = block.forward + block.tensor_forward, block.backward + block.tensor_backward
    lost = hardware.kernels.lost
    again = gather if run.zero == 3 else 0.0
    if not run.overlap:
        return run.micro_batches * layers * (gather + again), run.micro_batches * layers * reduce

    def waits(computing: float, transfer: float, passes: float) -> float:
        beside = min(1.0, computing / transfer) if transfer else 0.0
        return max(computing + lost * beside * passes, transfer) - computing

    waited_forward = layers * waits(forward, gather, gather_passes)
    beside = layers * waits(backward, again + reduce, (gather_passes if again else 0.0) + reduce_passes)
    share = again / (again + reduce) if again + reduce else 0.0
    # Embedding and output layer are gathered with nothing before them, and reduced with nothing after.
    waited_gather = run.micro_batches * (waited_forward + beside * share + gather + gathered(rest))
    return waited_gather, run.micro_batches * (beside * (1 - share) + reduced(rest))


def _block_parameters(run: Run) -> float:
    config = run.config
    embeddings = config.vocabulary * config.width * (1 if config.tied else 2)
    positions = config.context * config.width if config.position == "learned" else 0
    return (parameter_count(config) - embeddings - positions) / config.layers


def _replicated(run: Run, block: _Block, hardware: Hardware) -> tuple[float, float]:
    """The same where parameters are gathered at most once a step, and gradients reduced once."""
    shards, replicas = _groups(run, hardware)
    parameters = _parameters(run)
    count = max(1, math.ceil(parameters / run.bucket)) if run.bucket else 1

    def moved(over: Hardware) -> tuple[float, float]:
        def reduced(collective: str, size: float, group: network.Spread) -> float:
            return count * network.seconds(collective, size / count, group, over)

        gather = network.seconds("all_gather", parameters * run.gathered, shards, over) if run.zero else 0.0
        if run.zero and not run.reduces_whole:
            scattered = reduced("reduce_scatter", parameters * run.reduced, shards)
            return gather, scattered + reduced("all_reduce", parameters * run.reduced / shards.ranks, replicas)
        everywhere = network.spread(run.copies, hardware.devices_per_host, run.tensor)
        return gather, reduced("all_reduce", parameters * run.reduced, everywhere)

    gather, reduce = moved(hardware)
    if not run.overlap:
        return gather, reduce
    layers = run.config.layers / run.pipeline
    lost = hardware.kernels.lost

    gather_passes, reduce_passes = moved(network.unhindered(hardware))

    def waited(transfer: float, passes: float, computing: float) -> float:
        # What the first block needs, or the last one gives, has nothing to hide behind.
        hidden = transfer * (1 - 1 / layers)
        beside = min(1.0, computing / hidden) if hidden else 0.0
        return transfer / layers + max(computing + lost * beside * passes * (1 - 1 / layers), hidden) - computing

    if run.copied_parts and run.zero:
        gathered = gather + layers * run.copied_parts * shards.ranks * hardware.kernels.launch
    else:
        gathered = waited(gather, gather_passes, layers * block.forward)
    return gathered, waited(reduce, reduce_passes, layers * block.backward)
