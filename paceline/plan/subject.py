"""What is planned: a model's shapes, and its work for any micro-batch. Pure but for the model that is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.models.config import ModelConfig
from paceline.models.flops import flops_per_token
from paceline.models.transformer import Transformer
from paceline.plan.models import on_meta
from paceline.plan.stages import Shapes, shapes
from paceline.plan.transformer_work import transformer_work
from paceline.plan.work import Work


@dataclass(frozen=True)
class Subject:
    """A model as plans are made for it.

    Attributes:
        name: As the user calls it.
        shapes: Parameters and units.
        context: Tokens of a sample; 1 for models that are no language models.
        make: Gives the work of one micro-batch of so many samples, computed in a dtype.
        flops: Floating-point operations that a token needs, forward and backward, by which MFU is counted: 6 N + 12 L h
            s of a Transformer (Chowdhery et al. 2022). 0: those of the work.
        config: The shape, where it is a Transformer of paceline's own, which `paceline train` can train.
        with_context: The same model with samples of another length.
    """

    name: str
    shapes: Shapes
    context: int
    make: Callable[[int, str], Work]
    flops: float = 0.0
    config: ModelConfig | None = None
    with_context: Callable[[int], Subject] | None = None
    _made: dict[tuple[int, str], Work] = field(default_factory=dict, init=False, repr=False, compare=False)

    def work(self, samples: int, dtype: str) -> Work:
        """One micro-batch on one rank."""
        if (samples, dtype) not in self._made:
            self._made[samples, dtype] = self.make(samples, dtype)
        return self._made[samples, dtype]

    def flops_of(self, samples: int, dtype: str) -> float:
        """Floating-point operations that so many samples need, which recomputing does not raise."""
        return self.flops * self.context * samples or self.work(samples, dtype).flops


def transformer(name: str, config: ModelConfig, context: int = 0) -> Subject:
    """A Transformer of paceline's own, by formula.

    Args:
        name: As the user calls it.
        config: Its shape.
        context: Tokens of a sample, which learned positions must be enough for; 0: the model's longest.
    """
    context = context or config.context
    return Subject(
        name,
        shapes(on_meta(lambda: Transformer(config))),
        context,
        lambda samples, dtype: transformer_work(config, samples, context, dtype=dtype),
        flops_per_token(config, context),
        config,
        lambda other: transformer(name, config, other),
    )
