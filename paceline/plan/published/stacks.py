"""What published programs do differently where that changes a step's time: a few facts about each, none about a row."""

from __future__ import annotations

from dataclasses import dataclass
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
        separate: As `Software.separate`.
        attention: Its fused attention kernel; None where scores are written and read.
        own_launch: Whether it is slower to launch than PyTorch's operations alone, by what was fitted.
        cast_bytes: As `Software.cast_bytes`; Transformer Engine scales by steps before.
    """

    name: str
    compiled: bool = False
    complex_rotary: bool = False
    separate: bool = False
    attention: AttentionKernel | None = "flash2"
    own_launch: bool = False
    cast_bytes: float = 5.0


OWN = "paceline"
"""The program whose runs are forecast as `paceline plan` forecasts, by a trace."""

STACKS: dict[str, Stack] = {
    OWN: Stack("paceline"),
    "composer": Stack("LLM-Foundry (Composer, FSDP1)", attention="triton", cast_bytes=4.0),
    "fsdp": Stack("PyTorch FSDP", separate=True),
    "fms": Stack("IBM fms-fsdp (FSDP1, torch.compile)", compiled=True, separate=True),
    "torchtitan": Stack("torchtitan (FSDP2)", complex_rotary=True, separate=True),
    "nanotron": Stack("nanotron", compiled=True),
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
        separate=stack.separate,
        cast_bytes=stack.cast_bytes,
    )
