"""Small programs that each keep one thing which users write and an engine may get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import paceline as pl
from tests.programs.loops import LoopPlan
from tests.programs.models import ModelPlan
from tests.programs.program import Program

STAGES = {f"zero {zero}": pl.Strategy(zero=zero, bucket_mb=1e-4) for zero in (0, 1, 2, 3)}
SHARED = {
    f"zero {zero}, shared parameters": replace(STAGES[f"zero {zero}"], share_parameters=True) for zero in (1, 2, 3)
}
HELD = {"zero 3, hold": replace(STAGES["zero 3"], accumulation="hold")}
DEFERRED = {"zero 3, defer": replace(STAGES["zero 3"], accumulation="defer")}
EVERYWHERE = {**STAGES, **HELD, "zero 2, shared parameters": SHARED["zero 2, shared parameters"]}
UNLIKE = {**EVERYWHERE, **DEFERRED}
ONLY_3 = {name: strategy for name, strategy in EVERYWHERE.items() if name.startswith("zero 3")}

ORDINARY = ModelPlan()


def _blocks(*kinds: str) -> ModelPlan:
    return ModelPlan(blocks=("linear", *kinds, "linear"))


_CASES: dict[str, tuple[ModelPlan, LoopPlan, dict[str, pl.Strategy], str]] = {
    # Gradients that stay.
    "zeroed gradients": (ORDINARY, LoopPlan(zero_grad="zeros"), EVERYWHERE, "zero 2"),
    "zeroed gradients of parts": (
        replace(ORDINARY, branch="step"),
        LoopPlan(zero_grad="zeros", optimizer="adamw", micro_batches=(2,)),
        EVERYWHERE,
        "zero 1",
    ),
    "no zero_grad": (ORDINARY, LoopPlan(zero_grad="never"), EVERYWHERE, "zero 0"),
    "no zero_grad, micro-batches": (
        ORDINARY,
        LoopPlan(zero_grad="never", micro_batches=(2,)),
        EVERYWHERE,
        "zero 3, hold",
    ),
    "zero_grad in every other step": (
        ORDINARY,
        LoopPlan(zero_grad="sometimes", clip=0.1, steps=4),
        EVERYWHERE,
        "zero 2",
    ),
    "zero_grad between micro-batches": (ORDINARY, LoopPlan(drops=True, micro_batches=(2,)), EVERYWHERE, "zero 3"),
    "gradients scaled between micro-batches": (
        ORDINARY,
        LoopPlan(scales=True, micro_batches=(2,)),
        EVERYWHERE,
        "zero 2",
    ),
    "backward passes without no_sync": (ORDINARY, LoopPlan(way="backwards", micro_batches=(2,)), EVERYWHERE, "zero 1"),
    # Parameters outside of the forward that they belong to.
    "temperature": (ModelPlan(outside="temperature"), LoopPlan(), EVERYWHERE, "zero 3"),
    "temperature, adagrad": (ModelPlan(outside="temperature"), LoopPlan(optimizer="adagrad"), EVERYWHERE, "zero 2"),
    "logit scale": (ModelPlan(head="tied outside", outside="logit scale"), LoopPlan(), EVERYWHERE, "zero 3"),
    "head in a chunked loss": (ModelPlan(head="outside"), LoopPlan(), EVERYWHERE, "zero 3"),
    "tied head in a chunked loss": (ModelPlan(head="tied outside"), LoopPlan(), EVERYWHERE, "zero 3, hold"),
    "parameter read by a method": (ModelPlan(outside="method"), LoopPlan(), EVERYWHERE, "zero 3"),
    "loss weights": (ModelPlan(outside="loss weights"), LoopPlan(optimizer="adam"), EVERYWHERE, "zero 1"),
    # Units that are not called, or read elsewhere.
    "view of a parameter": (_blocks("gives view"), LoopPlan(), EVERYWHERE, "zero 3"),
    "late view of positions": (ModelPlan(positions="late view"), LoopPlan(), EVERYWHERE, "zero 3"),
    "parameter list": (_blocks("parameter list"), LoopPlan(), EVERYWHERE, "zero 3"),
    "parameter dict": (_blocks("parameter dict"), LoopPlan(), EVERYWHERE, "zero 3, hold"),
    "attention alone": (ModelPlan(whole="attention"), LoopPlan(), EVERYWHERE, "zero 3"),
    "attention inside": (_blocks("attention"), LoopPlan(), EVERYWHERE, "zero 3"),
    "block.forward": (_blocks("forward called"), LoopPlan(), EVERYWHERE, "zero 3"),
    "another method of a block": (_blocks("method called"), LoopPlan(), EVERYWHERE, "zero 3"),
    # Forwards that nothing follows.
    "logging with gradients": (
        ORDINARY,
        LoopPlan(logging="grad"),
        {**EVERYWHERE, **SHARED},
        "zero 1, shared parameters",
    ),
    "logging without gradients": (
        ORDINARY,
        LoopPlan(logging="no grad"),
        {**EVERYWHERE, **SHARED},
        "zero 3, shared parameters",
    ),
    "logging with gradients, clipped": (
        ORDINARY,
        LoopPlan(logging="grad", clip=0.1, micro_batches=(2,)),
        {**EVERYWHERE, **SHARED},
        "zero 2, shared parameters",
    ),
    # More than one of what there usually is one of.
    "two forwards, two backwards": (ORDINARY, LoopPlan(passes="two forwards"), EVERYWHERE, "zero 2"),
    "two backwards of one graph": (ORDINARY, LoopPlan(passes="retained"), EVERYWHERE, "zero 3"),
    "two losses in one backward": (ORDINARY, LoopPlan(passes="summed"), EVERYWHERE, "zero 0"),
    "regulariser before": (ORDINARY, LoopPlan(regulariser="before"), EVERYWHERE, "zero 3"),
    "regulariser after": (ORDINARY, LoopPlan(regulariser="after"), EVERYWHERE, "zero 3, hold"),
    "regulariser with a backward before": (ORDINARY, LoopPlan(regulariser="apart before"), EVERYWHERE, "zero 2"),
    "regulariser with a backward after": (ORDINARY, LoopPlan(regulariser="apart after"), EVERYWHERE, "zero 1"),
    "two models, one optimizer": (
        ORDINARY,
        LoopPlan(critic=True),
        {**EVERYWHERE, **SHARED},
        "zero 2, shared parameters",
    ),
    "two optimizers": (ORDINARY, LoopPlan(optimizers="two"), EVERYWHERE, "zero 1"),
    "two optimizers in turn": (ORDINARY, LoopPlan(optimizers="alternate"), EVERYWHERE, "zero 2"),
    "plain teacher": (ORDINARY, LoopPlan(teacher="plain"), EVERYWHERE, "zero 3"),
    "parallel teacher": (ORDINARY, LoopPlan(teacher="parallel"), EVERYWHERE, "zero 2, shared parameters"),
    "weights clamped by hand": (ORDINARY, LoopPlan(clamps=True), EVERYWHERE, "zero 2"),
    # Units inside others.
    "a layer that blocks are given": (ModelPlan(given="layer"), LoopPlan(), EVERYWHERE, "zero 3"),
    "a network that blocks are given": (
        ModelPlan(given="network called alone", blocks=("checkpoint inside", "linear", "in a checkpoint")),
        LoopPlan(logging="grad", micro_batches=(2,)),
        UNLIKE,
        "zero 3, defer",
    ),
    # Answers that are no tensors.
    "auxiliary loss": (_blocks("experts"), LoopPlan(), EVERYWHERE, "zero 3"),
    **{
        f"unit that {kind}": (_blocks(kind), LoopPlan(), ONLY_3, "zero 3")
        for kind in ("gives dict", "gives dataclass", "gives object", "gives generator", "fills list")
    },
    # Shapes and strides.
    "strides": (_blocks("strides"), LoopPlan(), EVERYWHERE, "zero 3"),
    "adagrad and scalars": (_blocks("odd shapes"), LoopPlan(optimizer="adagrad"), EVERYWHERE, "zero 1"),
    "scalars and no zero_grad": (_blocks("odd shapes"), LoopPlan(zero_grad="never", clip=0.1), EVERYWHERE, "zero 2"),
    "adam and scalars": (_blocks("odd shapes"), LoopPlan(optimizer="adam"), EVERYWHERE, "zero 3"),
    # Ranks that do not do alike.
    "unequal micro-batches": (ORDINARY, LoopPlan(micro_batches=(2, 3)), EVERYWHERE, "zero 2"),
    "uneven micro-batches": (
        ORDINARY,
        LoopPlan(micro_batches=(2, 3), way="uneven"),
        UNLIKE,
        "zero 0",
    ),
    "uneven micro-batches, no zero_grad": (
        ORDINARY,
        LoopPlan(micro_batches=(1, 2), way="uneven", zero_grad="never", clip=0.1),
        {**UNLIKE, "zero 0, each": replace(STAGES["zero 0"], accumulation="each")},
        "zero 0, each",
    ),
    "a rank with nothing": (
        ORDINARY,
        LoopPlan(micro_batches=(2, 0), way="uneven"),
        UNLIKE,
        "zero 3",
    ),
    "a rank with nothing, a block called twice": (
        replace(ORDINARY, calls=(1, 1, 0), head="tied"),
        LoopPlan(micro_batches=(2, 0), way="uneven"),
        UNLIKE,
        "zero 3, hold",
    ),
    "uneven branches by data": (
        ModelPlan(branch="data"),
        LoopPlan(micro_batches=(0, 1), way="uneven", steps=4),
        UNLIKE,
        "zero 3",
    ),
    "branch by data": (ModelPlan(branch="data"), LoopPlan(), UNLIKE, "zero 3"),
}
"""Model, loop, where to run them, and the one place of these that the quick run takes."""


def _programs() -> Iterator[tuple[str, Program]]:
    for name, (model, loop, strategies, _) in _CASES.items():
        for where, strategy in strategies.items():
            yield f"{name}: {where}", Program(model, loop, strategy)


HOLES: dict[str, Program] = dict(_programs())
"""By what they do and where."""

NEAREST = {f"{name}: {bites}" for name, (*_, bites) in _CASES.items()}
"""Each hole once, where an engine falls into it most easily."""
