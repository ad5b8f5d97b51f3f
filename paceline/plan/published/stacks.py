"""What published programs do differently where that changes a step's time: a few facts about each, none about a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from paceline.plan.transformer_work import Software

AttentionKernel = Literal["triton", "flash2", "flash3"]
"""FlashAttention's first algorithm in Triton, its second version, and its third or cuDNN's on GPUs from H100 on."""


@dataclass(frozen=True)
class Stack:
    """A program that tables were measured with.

    Attributes:
        name: As readers know it.
        compiled: Whether it runs norms, residuals and activations as few fused kernels.
        complex_rotary: As `Software.complex_rotary`.
        attention: Its fused attention kernel; None where scores are written and read.
        own_launch: Whether it is slower to launch than PyTorch's operations alone, by what was fitted.
        cast_bytes: As `Software.cast_bytes`; Transformer Engine scales by steps before.
        network: Bytes a second of the bus by which an all-reduce moves over so many hosts, as nccl-tests count them,
            where those who measured the tables measured their network, too.
    """

    name: str
    compiled: bool = False
    complex_rotary: bool = False
    attention: AttentionKernel | None = "flash2"
    own_launch: bool = False
    cast_bytes: float = 5.0
    network: Mapping[int, float] = field(default_factory=dict)

    def between(self, hosts: int, devices_per_host: int) -> float | None:
        """Bytes a second of each device between so many hosts, two or more, by what was measured; None if nothing was.

        In between the logarithm of their number counts, and beyond the largest it holds.
        """
        if not self.network:
            return None
        measured = sorted(self.network.items())
        bus = measured[-1][1]
        for (few, more_of), (many, less_of) in pairwise(measured):
            if few <= hosts <= many:
                bus = more_of + (less_of - more_of) * math.log(hosts / few) / math.log(many / few)
        # An all-reduce counts (n - 1) / n of a buffer, of which (h - 1) / h cross between hosts, on all their wires.
        ranks = hosts * devices_per_host
        return bus * (hosts - 1) / hosts * ranks / (ranks - 1) / devices_per_host


_PLAYBOOK = {2: 361.7e9, 4: 160.1e9, 8: 99.6e9, 16: 84.7e9, 32: 64.9e9, 64: 32.9e9}
"""Medians of all-reduces on the machines of the Ultra-Scale Playbook, where it shows what its network gives
(nanotron/ultrascale-playbook, src/fragments/pp_comm_bandwidth.html)."""

OWN = "paceline"
"""The program whose runs are forecast as `paceline plan` forecasts, by a trace."""

STACKS: dict[str, Stack] = {
    OWN: Stack("paceline"),
    "composer": Stack("LLM-Foundry (Composer, FSDP1)", attention="triton", cast_bytes=4.0),
    "fsdp": Stack("PyTorch FSDP"),
    "fms": Stack("IBM fms-fsdp (FSDP1, torch.compile)", compiled=True),
    "torchtitan": Stack("torchtitan (FSDP2)", complex_rotary=True),
    "nanotron": Stack("nanotron", compiled=True, network=_PLAYBOOK),
    "megatron": Stack("Megatron-LM", compiled=True, attention="flash3", cast_bytes=4.0),
    "nemo": Stack("NeMo", compiled=True, attention="flash3", cast_bytes=4.0),
    "megatron_2021": Stack("Megatron-LM of 2021", compiled=True, attention=None),
    "megatron_deepspeed": Stack("Megatron-DeepSpeed of 2022", compiled=True, attention=None, own_launch=True),
}
"""By the names that `describe.stack_of` finds."""


def software(stack: Stack, eager_passes: float, fused_passes: float, scores_passes: float) -> Software:
    """How a stack computes a Transformer, with constants as they were fitted."""
    return Software(
        fused_attention=stack.attention is not None,
        scores_passes=scores_passes,
        elementwise_passes=fused_passes if stack.compiled else eager_passes,
        compiled=stack.compiled,
        complex_rotary=stack.complex_rotary,
        cast_bytes=stack.cast_bytes,
    )
