"""Every mix of strategy, accumulation, precision and recomputing that `paceline verify --matrix` compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.strategy import SYSTEMS, Accumulation, Strategy
from paceline.verify.compare import Outcome
from paceline.verify.model_spec import ModelSpec

Precision = Literal["float32", "bfloat16", "float16"]
Recompute = Literal["none", "unit", "keep_attention"]

RANKS = 4
"""The fewest that can be sharded in several groups."""
STEPS = 3
MICRO_BATCHES = (1, 3)
BUCKET_MB = 0.1
"""Makes about ten buckets of the model."""

BUILD = "paceline.verify.nano:build"

ACCUMULATIONS: tuple[Accumulation, ...] = ("each", "defer", "hold")
RECOMPUTING: tuple[Recompute, ...] = ("none", "unit", "keep_attention")

SPECS: Mapping[Precision, ModelSpec] = {
    "float32": ModelSpec(BUILD, dtype="float64"),
    "bfloat16": ModelSpec(BUILD, dtype="float32"),
    "float16": ModelSpec(BUILD, dtype="float32"),
}
"""By precision, what is trained. precision=float32 leaves the model in its own dtype, here float64, where rounding is
told from errors by many orders of magnitude. The others compute with copies of fp32 weights."""

TOLERANCES: Mapping[Precision, float] = {"float32": 1e-9, "bfloat16": 1e-5, "float16": 1e-5}
"""Largest relative difference that counts as equal, by precision."""


@dataclass(frozen=True)
class Cell:
    """One mix of settings, and what became of it."""

    system: str
    strategy: Strategy
    micro_batches: int
    outcome: Outcome

    @property
    def size(self) -> float:
        """Largest relative difference of anything that was compared but the norm."""
        return max((size for kind, size in self.outcome.report.largest.items() if kind != "norm"), default=0.0)

    @property
    def norm(self) -> float:
        """Largest relative difference of the norm, which each side sums in its own way."""
        return self.outcome.report.largest.get("norm", 0.0)


def systems() -> dict[str, Strategy]:
    """The systems of data parallelism's history, the stages of ZeRO, shared parameters, and hybrid sharding."""
    stages = {f"zero {stage}": Strategy(zero=stage) for stage in (1, 2, 3)}
    stages["zero 2, shared parameters"] = Strategy(zero=2, share_parameters=True)
    hybrid = {f"zero {stage}, groups of 2": Strategy(zero=stage, shard=2) for stage in (1, 2, 3)}
    return {**{f"zero 0: {name}": strategy for name, strategy in SYSTEMS.items()}, **stages, **hybrid}


def mixes() -> Iterator[tuple[str, Strategy, int]]:
    """Every mix of settings that `Strategy` allows, and numbers of micro-batches."""
    for precision in SPECS:
        for name, system in systems().items():
            for accumulation in ACCUMULATIONS:
                for recompute in RECOMPUTING:
                    try:
                        strategy = replace(
                            system,
                            precision=precision,
                            accumulation=accumulation,
                            recompute=recompute,
                            bucket_mb=BUCKET_MB,
                        )
                    except UserError:
                        continue
                    for micro_batches in MICRO_BATCHES:
                        yield name, strategy, micro_batches
