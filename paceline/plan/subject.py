"""What is planned: a model's shapes, and its work for any micro-batch, from a trace of small ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Literal

from torch import nn

from paceline.models.config import ModelConfig
from paceline.models.flops import flops_per_token
from paceline.models.on_meta import on_meta
from paceline.models.transformer import Transformer
from paceline.plan.example_inputs import Inputs
from paceline.plan.rough_work import traced_or_rough
from paceline.plan.stages import Shapes, shapes
from paceline.plan.work import Operation, UnitWork, Work

Kernels = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Subject:
    """A model as plans are made for it.

    Attributes:
        name: As the user calls it.
        shapes: Parameters and units.
        context: Tokens of a sample; 1 for models that are no language models.
        make: Gives the work of one micro-batch of so many samples, computed in a dtype.
        flops: Floating-point operations that a token needs, forward and backward, by which MFU is counted: 6 N + 12 L h
            s of a Transformer (Chowdhery et al. 2022). 0: those that the work needs, counted alike.
        least: Samples of a micro-batch at least, by what is computed in: 2 where the model raises on one alone, as it
            does with BatchNorm over a single value of each channel.
        with_context: The same model with samples of another length.
    """

    name: str
    shapes: Shapes
    context: int
    make: Callable[[int, str], Work]
    flops: float = 0.0
    least: Callable[[str], int] = lambda _: 1
    with_context: Callable[[int], Subject] | None = None
    _made: dict[tuple[int, str], Work] = field(default_factory=dict, init=False, repr=False, compare=False)

    def work(self, samples: int, dtype: str) -> Work:
        """One micro-batch on one rank."""
        if (samples, dtype) not in self._made:
            self._made[samples, dtype] = self.make(samples, dtype)
        return self._made[samples, dtype]

    def flops_of(self, samples: int, dtype: str) -> float:
        """Floating-point operations that a micro-batch needs, which recomputing does not raise."""
        return self.flops * self.context * samples or self.work(samples, dtype).needed_flops


@lru_cache(maxsize=32)
def transformer(name: str, config: ModelConfig, context: int = 0, kernels: Kernels = "cuda") -> Subject:
    """A Transformer of paceline's own, with what was traced of it before.

    Args:
        name: As the user calls it.
        config: Its shape.
        context: Tokens of a sample, which learned positions must be enough for; 0: the model's longest.
        kernels: Of the device whose attention kernels it computes with.
    """
    context = context or config.context
    found = of_module(name, on_meta(lambda: Transformer(config)), None, context, kernels, is_even=True)
    return replace(
        found,
        flops=flops_per_token(config, context),
        with_context=lambda other: transformer(name, config, other, kernels),
    )


def of_module(
    name: str,
    model: nn.Module,
    inputs: Inputs | None = None,
    context: int = 0,
    kernels: Kernels = "cuda",
    is_even: bool = False,
) -> Subject:
    """Any model, by a trace.

    Args:
        name: As the user calls it.
        model: The module, on any device.
        inputs: What it is called with, if it is no language model.
        context: Tokens of a sample; 0: the model's longest.
        kernels: Of the device whose attention kernels it computes with.
        is_even: Whether it is known to take as much more for each sample; else traces of four and of many tell.
    """
    known: dict[tuple[int, str], Work] = {}

    def traced(samples: int, dtype: str) -> Work:
        if (samples, dtype) not in known:
            known[samples, dtype] = traced_or_rough(
                model, samples, length=context, inputs=inputs, precision=dtype, device=kernels
            )
        return known[samples, dtype]

    def is_rough(samples: int, dtype: str) -> bool:
        return traced(samples, dtype).source == "rough"

    def least(dtype: str) -> int:
        return 2 if is_rough(1, dtype) and not is_rough(2, dtype) else 1

    def line(samples: int, dtype: str) -> Work | None:
        first = least(dtype)
        return extended(traced(first, dtype), traced(first + 1, dtype), samples - first + 1)

    @cache
    def grows_evenly(samples: int) -> bool:
        # Each sample with each other one, as in a contrastive loss, is more than a part for each sample, and what is
        # the least for few, as a capacity, is more for many.
        dtype = "float32" if is_rough(least("bfloat16"), "bfloat16") else "bfloat16"
        made = line(samples, dtype)
        return made is not None and _alike(made, traced(samples, dtype))

    def work(samples: int, dtype: str) -> Work:
        is_line = samples > least(dtype) + 1 and (
            is_even or (grows_evenly(4) and (samples < 5 or grows_evenly(_many(samples))))
        )
        return grouped((line(samples, dtype) if is_line else None) or traced(samples, dtype))

    length = context if context and inputs is None else traced(1, "bfloat16").tokens
    return Subject(
        name,
        shapes(model),
        length,
        work,
        least=least,
        with_context=None if inputs is not None else lambda other: of_module(name, model, inputs, other, kernels),
    )


def _many(samples: int) -> int:
    """The first of 64, 1,024, 16,384 and so on that is as many: one trace for all that there are between two."""
    many = 64
    while many < samples:
        many *= 16
    return many


def _alike(one: Work, other: Work) -> bool:
    """Whether two count as much: of few samples what each has with each other is next to nothing."""
    return all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(_totals(one), _totals(other), strict=True))


def _totals(work: Work) -> tuple[float, float, float]:
    """Operations, bytes that they read and write, and bytes that are kept for backward."""
    each = [op for unit in work.units for op in (*unit.forward, *unit.backward)]
    return (
        sum(op.flops * op.count for op in each),
        sum(op.bytes * op.count for op in each),
        sum(unit.kept for unit in work.units),
    )


def extended(one: Work, two: Work, samples: int) -> Work | None:
    """The work of many samples from that of one and of two: every size is a constant and a part for each sample.

    What a pass holds at its fullest is the most of such sizes: with more samples another moment may be the fullest.
    None where the two do not compute alike, operation by operation.

    Args:
        one: As `trace` gives it, each operation by itself: some are alike with one number of samples alone.
        two: The same.
        samples: How many.
    """
    if [unit.unit for unit in one.units] != [unit.unit for unit in two.units]:
        return None
    made: dict[tuple[int, int], tuple[Operation, ...]] = {}
    moments: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    def line(first: float, second: float) -> float:
        return first + (samples - 1) * (second - first)

    def sizes(first: int, second: int) -> int:
        return first + (samples - 1) * (second - first)

    def operations(first: tuple[Operation, ...], second: tuple[Operation, ...]) -> tuple[Operation, ...]:
        # Blocks alike share their operations, and go on doing so.
        key = (id(first), id(second))
        if key not in made:
            made[key] = tuple(
                replace(
                    a,
                    flops=line(a.flops, b.flops),
                    bytes=line(a.bytes, b.bytes),
                    shape=(
                        sizes(a.shape[0], b.shape[0]),
                        sizes(a.shape[1], b.shape[1]),
                        sizes(a.shape[2], b.shape[2]),
                        sizes(a.shape[3], b.shape[3]),
                    ),
                )
                for a, b in zip(first, second, strict=True)
            )
        return made[key]

    units: list[UnitWork] = []
    for a, b in zip(one.units, two.units, strict=True):
        pairs = ((a.forward, b.forward), (a.backward, b.backward), (a.again or (), b.again or ()))
        if any(_kinds(first) != _kinds(second) for first, second in pairs):
            return None
        if [*map(len, a.held)] != [*map(len, b.held)]:
            return None
        if (id(a.held), id(b.held)) not in moments:
            moments[id(a.held), id(b.held)] = tuple(
                tuple(map(sizes, first, second)) for first, second in zip(a.held, b.held, strict=True)
            )
        held = moments[id(a.held), id(b.held)]
        most = [max((0, *own)) for own in held] or [
            sizes(a.forward_peak, b.forward_peak),
            sizes(a.backward_peak, b.backward_peak),
            sizes(a.backward_whole, b.backward_whole),
        ]
        units.append(
            UnitWork(
                a.unit,
                operations(a.forward, b.forward),
                operations(a.backward, b.backward),
                sizes(a.kept, b.kept),
                sizes(a.kept_input, b.kept_input),
                sizes(a.kept_attention, b.kept_attention),
                most[0],
                most[1],
                most[2],
                None if a.again is None or b.again is None else operations(a.again, b.again),
                sizes(a.logits, b.logits),
                held,
            )
        )
    return replace(
        one,
        units=tuple(units),
        samples=sizes(one.samples, two.samples),
        tokens=sizes(one.tokens, two.tokens),
    )


def _kinds(operations: tuple[Operation, ...]) -> list[tuple[str, str, int]]:
    return [(each.kind, each.dtype, each.count) for each in operations]


def grouped(work: Work) -> Work:
    """The same with operations that are alike as one with their count. Blocks alike go on sharing theirs."""
    made: dict[int, tuple[Operation, ...]] = {}

    def together(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        if id(operations) not in made:
            counts = Counter[Operation]()
            for each in operations:
                counts[replace(each, count=1)] += each.count
            made[id(operations)] = tuple(replace(each, count=count) for each, count in counts.items())
        return made[id(operations)]

    units = (
        replace(
            each,
            forward=together(each.forward),
            backward=together(each.backward),
            again=None if each.again is None else together(each.again),
        )
        for each in work.units
    )
    return replace(work, units=tuple(units))
