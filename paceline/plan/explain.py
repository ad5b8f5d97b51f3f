"""Each term of the recommended setting: its number, its formula with what went in, its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.command_line import quantities as said
from paceline.core.ops import COMPUTE
from paceline.plan.case import Case
from paceline.plan.costs import OPTIMIZER_BYTES
from paceline.plan.estimate import Estimate
from paceline.plan.footprint import FREE
from paceline.plan.network import measured_rates, spread
from paceline.plan.quantities import gib, si


@dataclass(frozen=True)
class Term:
    """One number of a forecast.

    Attributes:
        name: What it is.
        value: The number, with its unit.
        formula: How it comes about, with the numbers that went in.
        source: Who says so.
    """

    name: str
    value: str
    formula: str
    source: str


def terms(case: Case, estimate: Estimate) -> Iterator[Term]:
    """The terms of a setting's time and memory.

    Args:
        case: Model, machines, devices.
        estimate: The setting.
    """
    yield from _computing(case, estimate)
    yield from _communicating(case, estimate)
    yield from _rest(case, estimate)
    yield from _memory(case, estimate)


def _computing(case: Case, estimate: Estimate) -> Iterator[Term]:
    setting, hardware = estimate.setting, case.hardware
    precision, kernels = setting.strategy.precision, case.hardware.kernels
    work = case.subject.work(setting.samples, precision)
    operations = [op for unit in work.units for op in (*unit.forward, *unit.backward)]
    spent = case.spent(setting)
    flops = {kind: sum(op.flops * op.count for op in operations if op.kind == kind) for kind in ("matmul", "attention")}
    matrices = sum(op.bytes * op.count for op in operations if op.kind == "matmul" and op.flops)
    count = sum(op.count for op in operations)
    matmuls, attention = f"matmuls {si(flops['matmul'])}FLOP", f"attention {si(flops['attention'])}FLOP"
    moved = f"{si(spent.moved)}B by kernels that do not multiply"
    if hardware.is_cpu:
        attention, moved = f"{attention}, measured at their sizes", f"{moved}, measured at their sizes"
    else:
        rate = f"({si(hardware.device.bandwidth)}B/s x {kernels.memory_efficiency:g})"
        ceiling = si(hardware.device.ceiling[precision])
        matmuls += f" / ({ceiling}FLOP/s x {kernels.matmul_efficiency:g}) + {kernels.matmul_passes:g} passes over "
        matmuls += f"their {si(matrices)}B / {rate}"
        attention += f" at {kernels.attention_efficiency:g} of that ceiling"
        moved += f" / {rate}"
    yield Term(
        "multiplying",
        f"{said.seconds(spent.compute)} a micro-batch",
        f"{matmuls}, and {attention}",
        f"operations: {work.source}; ceiling: {hardware.source}; shares: docs/accuracy.md",
    )
    yield Term(
        "moving",
        f"{said.seconds(spent.moving)} a micro-batch",
        moved,
        "roofline (Williams et al. 2009)",
    )
    yield Term(
        "launching",
        f"{said.seconds(spent.launching)} a micro-batch",
        f"by how much launching a unit's kernels takes longer than they do: {count:,} in all x "
        f"{1e6 * kernels.launch:g} us",
        "the host runs ahead of the device by units",
    )
    plain = setting.micro_batches * (spent.compute + spent.moving + spent.launching)
    yield Term(
        "compute",
        said.seconds(estimate.compute),
        f"{setting.micro_batches} micro-batches x {said.seconds(plain / setting.micro_batches)}, and "
        f"{said.seconds(max(0.0, estimate.compute - plain - estimate.slowed))} of recomputing and copying gradients, "
        f"{said.seconds(estimate.slowed)} lost beside communication, {kernels.lost:.2f} of each second that it takes "
        "at the rate of a host's links",
        "simulation of the engine's schedule",
    )


def _communicating(case: Case, estimate: Estimate) -> Iterator[Term]:
    setting, hardware = estimate.setting, case.hardware
    schedule = case.schedule(setting.strategy)
    host = hardware.devices_per_host
    groups = {
        "world": spread(case.devices, host),
        "shard": spread(schedule.shards, host),
        "replicate": spread(schedule.replicas, host, schedule.shards),
    }

    def collectives(micro_batches: int) -> Mapping[str, float]:
        numbers, sizes = Counter[str](), Counter[str]()
        for op in case.ops(setting.strategy, micro_batches):
            if op.kind not in COMPUTE and op.stream != "statistics":
                numbers[f"{op.kind} {op.group} number"] += 1
                sizes[f"{op.kind} {op.group} bytes"] += op.bytes
        return {**numbers, **sizes}

    found = case.step_of(setting, collectives)
    for name in [name for name in found if name.endswith(" number")]:
        kind, group, _ = name.split()
        number, size = round(found[name]), found[f"{kind} {group} bytes"]
        where = groups[group]
        n, hosts = where.ranks, where.hosts
        twice = "2 x " if kind == "all_reduce" else ""
        within = f"B (n-1)/n / {si(hardware.within.bandwidth)}B/s"
        between = f"B (h-1)/h / ({where.within} x {si(hardware.between.bandwidth)}B/s)"
        formula = f"max({within}, {between})" if where.within > 1 and hosts > 1 else between if hosts > 1 else within
        formula = f"{twice}{formula} + a latency for each step of the ring"
        source = "ring (Thakur et al. 2005), links: datasheet x 0.8 (nccl-tests)"
        if (rates := measured_rates(kind, where, hardware)) is not None:
            speed = f" + B / {si(1 / rates.per_byte)}B/s" if rates.per_byte else ""
            formula, source = f"{said.seconds(rates.fixed)}{speed}", f"measured between {n} ranks of a host"
        yield Term(
            kind,
            f"{gib(size)} GiB a step in {number:,}",
            f"{formula}; n = {n}, h = {hosts}; waited for {said.seconds(estimate.exposed.get(kind, 0.0))} of a step",
            source,
        )


def _rest(case: Case, estimate: Estimate) -> Iterator[Term]:
    hardware, strategy = case.hardware, estimate.setting.strategy
    moves = hardware.device.bandwidth * hardware.kernels.memory_efficiency
    updated = case.subject.shapes.numel / strategy.shards(case.devices)
    yield Term(
        "update",
        said.seconds(estimate.optimizer),
        f"{si(updated)} parameters x {OPTIMIZER_BYTES} bytes (and 6 for a cast) / {si(moves)}B/s",
        "Adam reads 4 and writes 3 fp32 numbers each",
    )
    yield Term(
        "slowest rank",
        said.seconds(estimate.bubble),
        f"{hardware.kernels.straggling:g} of the step for each doubling of hosts"
        + (f", and a rank that takes {case.slow_rank:g} times as long" if case.slow_rank > 1 else ""),
        "fitted: docs/accuracy.md",
    )
    counted = "6 N + 12 L h s a token" if case.subject.flops else "products of the trace, all scores, none twice"
    yield Term(
        "MFU",
        f"{100 * estimate.mfu:.1f} %",
        f"{si(estimate.flops)}FLOP / {said.seconds(estimate.seconds)} / {si(estimate.peak_flops)}FLOP/s",
        f"{counted} (Chowdhery et al. 2022), the datasheet's peak",
    )


def _memory(case: Case, estimate: Estimate) -> Iterator[Term]:
    setting, memory = estimate.setting, estimate.memory
    strategy = setting.strategy
    shards = strategy.shards(case.devices)
    stage, low = strategy.stage, strategy.low
    sharded = stage >= 2 and strategy.reduces_every_micro_batch
    states = f"{'12' if low else '8'} P{f' / {shards}' if stage else ''}"
    buffers = ", and the model's buffers" if case.subject.shapes.buffers else ""
    buffer = "the schedule's buffers, P padded"
    work = case.subject.work(setting.samples, strategy.precision)
    held = {
        "parameters": (f"{2 if low else 4} P{f' / {shards}' if stage == 3 else ''}{buffers}", buffer),
        "gradients": (
            f"4 P{f' / {shards}' if sharded else ''}, and what autograd holds at the peak",
            f"{buffer}; docs/planning.md: what a step adds",
        ),
        "optimizer": (f"{states}: {'fp32 master and ' if low else ''}Adam's two states", buffer),
        "activations": (
            f"what is kept for backward by {setting.samples} x {case.subject.context:,} tokens",
            f"storages that autograd keeps: {work.source}",
        ),
        "logits": ("the output layer's results", f"what is kept as wide as the vocabulary: {work.source}"),
        "buckets": ("two slots for whole gradients", buffer),
        "gathered": (f"{strategy.prefetch + 1} slots for whole units, and small units", buffer),
        "framework": ("context and communicators, outside of the allocator", case.hardware.source),
    }
    for name, size in memory.by_kind.items():
        if size:
            yield Term(name, f"{gib(size)} GiB", *held[name])
    yield Term(
        "fits",
        f"{gib(memory.peak)} of {gib(estimate.capacity)} GiB",
        f"{100 * FREE:g} % of {gib(case.hardware.device.memory)} GiB stay free for fragments",
        f"fullest in {memory.moment}",
    )
