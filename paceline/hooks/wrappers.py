"""Torch's own wrappers, inside of a parallel model or around it: they would reduce or shard gradients once more."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UserError
from paceline.models.units import named_parameters


def require_unwrapped(model: nn.Module) -> None:
    """Refuses a model that is trained by another data parallelism, in whole or in part.

    Raises:
        UserError: It is.
    """
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel) and any(p.requires_grad for p in part.parameters()):
            raise UserError(
                f"parallelize: {name or 'the model'} is a DistributedDataParallel, which reduces gradients itself: "
                "leave it out, and give pl.parallelize the module that it wraps (its .module)"
            )
    # Importing it takes most of a second, and whoever has one has it.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, parameter in named_parameters(model):
        if isinstance(parameter, kind):
            raise UserError(
                f"parallelize: {name} is a DTensor, as torch's fully_shard and parallelize_module make it: leave these "
                "out, and set strategy.zero to 3 for what fully_shard does"
            )


def refuse_ddp_around(model: nn.Module) -> None:
    """Refuses a forward inside a DistributedDataParallel's, whose reductions would meet shards.

    Raises:
        UserError: It is inside.
    """
    around = DistributedDataParallel._get_active_ddp_module()
    if around is not None and any(part is model for part in around.modules()):
        raise UserError(
            f"the parallel {type(model).__name__} is inside a DistributedDataParallel, which would reduce its "
            "gradients once more: leave DistributedDataParallel out, or set strategy.zero to 0"
        )
