"""Dynamic loss scaling for fp16, decided alike on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from paceline.comm.control import all_gather_json
from paceline.comm.world import current_world
from paceline.core.errors import UserError
from paceline.tensors.reduced_norm import scaling


class GradScaler(torch.amp.GradScaler):
    """torch's gradient scaler, with one decision for all ranks: an infinity on one makes every rank skip the step.

    Used as torch's (Micikevicius et al. 2018): `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)` before
    clipping, `scaler.step(optimizer)`, `scaler.update()`. A rank sees only its shards of sharded gradients, so each on
    its own would skip other steps than the rest. Unscaling waits for the host.
    """

    def __init__(self, device: str | None = None, **options: Any) -> None:
        """Takes the arguments of `torch.amp.GradScaler`; the device need not be said, as it is the job's.

        Raises:
            UserError: It is another one.
        """
        computes = current_world().device.type
        if device is not None and torch.device(device).type != computes:
            raise UserError(f"pl.GradScaler: expected device={computes!r}, as ranks compute there, got {device!r}")
        super().__init__(computes, **options)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides gradients by the scale, then agrees on whether any rank found one that is not finite."""
        if not self._enabled:
            return
        if self._scale is None:
            # A rank without a micro-batch in the first step has scaled nothing yet.
            self._lazy_init_scale_growth_tracker(current_world().device)
        assert self._scale is not None
        # Ranks decide together, so it may look at each one's shards.
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch._C.DisableTorchFunctionSubclass(), scaling(gradients, self._scale.double().reciprocal()):
            super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        found = state["found_inf_per_device"]
        mine = max((float(flag) for flag in found.values()), default=0.0)
        anywhere = max(all_gather_json(mine, "infinite gradients"))
        device = current_world().device
        state["found_inf_per_device"] = {device: torch.full((1,), anywhere, dtype=torch.float32, device=device)}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer, or on every rank does not."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if self._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
            self.unscale_(optimizer)
        # Fused optimizers would otherwise look for infinities themselves, each rank alone.
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
