"""What a model computes in one micro-batch, unit by unit: operations with their shapes, and what is kept for backward.

A trace of any module (`plan.trace`) and the formulas of a Transformer (`plan.transformer_work`) both give it; what it
takes on a device is another matter (`plan.kernels`). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

OperationKind = Literal["matmul", "attention", "memory"]
"""What bounds an operation: multiplying matrices, attention that is one kernel, or moving bytes."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel's work, or that of `count` alike.

    Attributes:
        kind: Which costs apply.
        flops: Floating-point operations that one executes; two for each multiply-add. Of causal attention only the
            half that kernels compute counts.
        bytes: What one reads from and writes to the device's memory at least.
        dtype: What it computes in, as in `Strategy.precision`.
        shape: (batch, rows, inner, columns) of a matmul; (batch x heads, queries, keys, head width) of attention.
        count: How many alike there are.
        name: The operator, such as "gelu", where it is known.
        needed: How many times as many operations the model needs, whatever kernels compute: all scores of causal
            attention, each product of its backward once, and nothing of what is computed again.
    """

    kind: OperationKind
    flops: float
    bytes: float
    dtype: str
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    count: int = 1
    name: str = ""
    needed: float = 1.0
    aligned: bool = True

    @property
    def blocks(self) -> int:
        """Blocks of queries that torch's kernel of attention for CPUs computes one after another; else 0.

        Each is five small products in backward and two in forward, which take a time of their own: 32 queries, 64 where
        there are 192 and more, 256 from 768 on (ATen/native/cpu/FlashAttentionKernel.cpp).
        """
        if self.kind != "attention":
            return 0
        heads, queries = self.shape[:2]
        rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
        return heads * math.ceil(queries / rows)


@dataclass(frozen=True)
class UnitWork:
    """What one unit computes and keeps in one micro-batch on one rank.

    Attributes:
        unit: Its name in the layout; "" is what the model does outside of its units.
        forward: Operations of the forward pass.
        backward: Operations of the backward pass, without what recomputing adds.
        again: Operations of the forward that run once more where the unit is recomputed, which ends where the last
            tensor is saved; None: all of them.
        kept: Bytes of activations that live from the unit's forward to its backward, each storage once.
        kept_input: Bytes of them that are left where the unit is recomputed: its inputs.
        kept_attention: Bytes of them that are left with `recompute="keep_attention"`.
        forward_peak: Bytes that the forward holds at its fullest beyond what it keeps.
        backward_peak: Bytes that the backward holds at its fullest beyond what was kept, gradients of parameters
            apart.
        backward_whole: The same with the gradients of the unit's own parameters, as they come; 0: not known.
        logits: Bytes of what it keeps that are the output layer's results, or what the loss makes of them.
        held: Where it was traced what the last three are the most of: bytes at each change of what is held, in its
            forward, its backward, and its backward with those gradients.
    """

    unit: str
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    kept: int
    kept_input: int
    kept_attention: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    backward_whole: int = 0
    again: tuple[Operation, ...] | None = None
    logits: int = 0
    held: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward."""
        return sum(each.flops * each.count for each in (*self.forward, *self.backward))

    @property
    def needed_flops(self) -> float:
        """Those that the model needs."""
        return sum(each.flops * each.needed * each.count for each in (*self.forward, *self.backward))


@dataclass(frozen=True)
class Work:
    """One micro-batch on one rank.

    Attributes:
        units: In the order in which they run.
        samples: Sequences in the micro-batch.
        tokens: Tokens of all of them; for models that are no language models, samples.
        source: Where it comes from: "trace", "formula", or what a trace could not follow.
        shares: Whether several units may share a parameter, such as a tied embedding, whose gradient has parts then.
    """

    units: tuple[UnitWork, ...]
    samples: int
    tokens: int
    source: str = "formula"
    warnings: tuple[str, ...] = field(default=())
    shares: bool = True

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward."""
        return sum(unit.flops for unit in self.units)

    @property
    def needed_flops(self) -> float:
        """Those that the model needs, by which MFU is counted (Chowdhery et al. 2022)."""
        return sum(unit.needed_flops for unit in self.units)
