"""Weights that modules and loops write to by hand."""

from __future__ import annotations

import torch

from tests.idioms.side import Found, Side, idiom, mlp, trained

EDITED = (("zero 3", "was edited"), ("low", "was edited"), ("shared parameters", "was edited"))


@idiom(refused=EDITED)
def weights_clamped_in_a_hook_of_their_block(side: Side) -> Found:
    """By way of `.data`, as older code does."""
    model = mlp(side)

    def clamp(block: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        block[0].weight.data.clamp_(-0.2, 0.2)

    model[1].register_forward_pre_hook(clamp)
    return trained(side, model)
