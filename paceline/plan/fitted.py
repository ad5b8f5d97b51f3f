"""The constants that were fitted to published measurements: few, each with a meaning and a standard error.

`python -m paceline.plan.published.fit` fits them again; `paceline plan --validate` shows how wrong forecasts are with
them. Those of matmuls, memory and waiting are one number for A100 and H100 alike, which is why they are taken to hold
for a GPU that nobody measured: its datasheet and its measured matmul ceiling make the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.hardware import Kernels


@dataclass(frozen=True)
class Constants:
    """What is fitted.

    Attributes:
        matmul_efficiency: Share of the measured matmul ceiling (MAMF) that a model's large matmuls reach.
        matmul_passes: How often their matrices pass through memory beside that.
        eager_passes: How often a block of PyTorch's single operations reads or writes the residual stream forward.
        triton_a100: Share of the ceiling of FlashAttention in Triton, as LLM-Foundry ran it on A100.
        triton_h100: The same on H100.
        contention: Seconds of computing that are lost for each second of a collective beside it at the rate of a
            host's links.
        straggling: How much longer a step takes with each doubling of hosts.
        launch: Seconds in which Megatron-DeepSpeed's host launches one operation of `transformer_work`, each of which
            is several kernels.
        fused_passes: As eager_passes, with the fused kernels of Megatron.
        scores_passes: How often materialised attention reads or writes the scores forward, beyond its products.
        exchange_latency: Seconds that Megatron-DeepSpeed's collectives between tensor ranks take for each step of
            the ring.
    """

    matmul_efficiency: float
    matmul_passes: float
    eager_passes: float
    triton_a100: float
    triton_h100: float
    contention: float
    straggling: float
    launch: float
    fused_passes: float
    scores_passes: float
    exchange_latency: float


FITTED = Constants(
    matmul_efficiency=0.999,
    matmul_passes=1.76,
    eager_passes=22.7,
    triton_a100=0.368,
    triton_h100=0.212,
    contention=0.875,
    straggling=0.00495,
    launch=8.06e-05,
    fused_passes=6.09,
    scores_passes=4.4,
    exchange_latency=3.82e-05,
)
"""The fit to llm_foundry.csv (130 rows) and vtrain_a100.csv (929 rows)."""

ERRORS = Constants(
    matmul_efficiency=0.0116,
    matmul_passes=0.146,
    eager_passes=3.17,
    triton_a100=0.00412,
    triton_h100=0.00336,
    contention=0.0563,
    straggling=0.00157,
    launch=3.97e-07,
    fused_passes=2.03,
    scores_passes=0.605,
    exchange_latency=1.18e-06,
)
"""Standard errors of the same."""

PRIOR = Constants(
    matmul_efficiency=0.97,
    matmul_passes=1.5,
    eager_passes=20.0,
    triton_a100=0.37,
    triton_h100=0.22,
    contention=0.3,
    straggling=0.005,
    launch=5e-5,
    fused_passes=12.0,
    scores_passes=5.0,
    exchange_latency=1.5e-5,
)
"""What was held likely before fitting: the starting point, and what holds a constant that the rows say little of."""

SPREAD = Constants(
    matmul_efficiency=0.03,
    matmul_passes=0.5,
    eager_passes=0.5,
    triton_a100=0.5,
    triton_h100=0.5,
    contention=0.7,
    straggling=1.0,
    launch=1.0,
    fused_passes=0.5,
    scores_passes=0.5,
    exchange_latency=1.0,
)
"""How sure that was, as a standard deviation of the logarithm."""

MEMORY_EFFICIENCY = 0.85
"""Share of a datasheet's memory bandwidth that copies reach on A100 and H100 (BabelStream); not fitted."""

LAUNCH = 6e-6
"""Seconds in which PyTorch launches one operation; not fitted."""

_MOST_LOST = 0.95
"""Seconds of computing that a second of communication takes away at most, so that both go on."""

_FLASH2 = {"a100": 0.70, "h100": 0.38}
"""Share of the ceiling that FlashAttention-2 reaches, forward and backward together, causal, 8k tokens, heads of 128:
190 TFLOP/s of 271 on A100 and some 300 of 795 on H100 (Dao 2023, figures 4 to 7)."""
_FLASH3 = {"h100": 0.62}
"""The same of FlashAttention-3 and cuDNN: some 490 TFLOP/s (Shah et al. 2024, figures 5 and 6)."""
_ELSEWHERE = 0.4
"""Where nobody published it."""


def attention(device: str, kernel: str = "flash2", constants: Constants = FITTED) -> float:
    """Share of a device's matmul ceiling that fused attention reaches.

    Args:
        device: A profile's name.
        kernel: triton, flash2 or flash3.
        constants: Those of triton are fitted.
    """
    kind = "a100" if device.startswith("a100") else "h100" if device.startswith(("h100", "h200", "gh200")) else ""
    if kernel == "triton" and kind:
        return constants.triton_a100 if kind == "a100" else constants.triton_h100
    if kernel == "flash3" and kind in _FLASH3:
        return _FLASH3[kind]
    return _FLASH2.get(kind, _ELSEWHERE)


def kernels(device: str, kernel: str = "flash2", constants: Constants = FITTED) -> Kernels:
    """What kernels of a device reach, by what was fitted.

    Args:
        device: A profile's name. Of GPUs other than A100 and H100 only ceilings and bandwidth differ.
        kernel: Which fused attention.
        constants: The fitted ones.
    """
    return Kernels(
        launch=LAUNCH,
        memory_efficiency=MEMORY_EFFICIENCY,
        matmul_efficiency=constants.matmul_efficiency,
        half_flops=0.0,
        attention_efficiency=attention(device, kernel, constants),
        # What takes nine tenths of each second makes computing take ten times as long.
        contention=min(constants.contention, _MOST_LOST) / (1 - min(constants.contention, _MOST_LOST)),
        straggling=constants.straggling,
        matmul_passes=constants.matmul_passes,
    )
