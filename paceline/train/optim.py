"""The update: mean over tokens, clipping and AdamW in one pass over the gradients."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from paceline.optimizers.elementwise import elementwise
from paceline.train.dynamic_loss_scale import DynamicLossScale
from paceline.train.sections import OptimConfig
from paceline.train.spikes import Spikes


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step` of `steps`, counted from 0.

    It rises linearly over the warmup, reaching the highest value in the first step after it, then falls to
    `final_lr_fraction` of it in the last step: linearly, or along half a cosine (Loshchilov and Hutter 2017).
    """
    warmup = config.warmup * steps if config.warmup < 1 else config.warmup
    if step < warmup:
        return config.lr * (step + 1) / (math.floor(warmup) + 1)
    progress = (step - warmup) / max(1.0, steps - 1 - warmup)
    fraction = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * fraction)


@elementwise
class AdamW(torch.optim.AdamW):
    """Torch's, for loops that nobody compiles.

    Torch's own imports torch's compiler to be left alone by it: as long as torch itself, and 70 MB that every rank
    would hold.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Update:
    """Steps AdamW on gradients that are sums over tokens.

    Attributes:
        optimizer: AdamW.
        skips: fp32 (2,), on the device: steps left out because the gradient norm was not finite, or stood out, so far
            and in a row up to the latest one.
        scale: fp32, 0-dim, on the device: what losses are to be multiplied by before backward.
        done: Steps done, those that were left out among them. Counted when the weights change: what follows, such as
            sending them, may fail.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        steps: int,
        device: torch.device,
        loss_scale: DynamicLossScale | None = None,
    ) -> None:
        """Makes the optimizer.

        Args:
            model: Its matrices get weight decay, biases and norms none.
            config: Rates.
            steps: Length of the training in optimizer steps.
            device: Where the model is.
            loss_scale: What decides on that; without it, losses stay as they are.
        """
        self._config, self._steps, self._loss_scale = config, steps, loss_scale
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.skips = torch.zeros(2, device=device)
        self.scale = torch.ones((), device=device) if loss_scale is None else loss_scale.value
        self.done = 0
        self._unusable = self._not_finite = torch.zeros((), device=device)
        self._spikes = Spikes(config.skip_spikes, device) if config.skip_spikes else None

    def __call__(self, step: int, tokens: Tensor, nats: Tensor, norm: Tensor) -> Tensor:
        """One step, or none where the norm is not finite or stands out: decided on the device, alike on every rank.

        Args:
            step: Number of the optimizer step, from 0.
            tokens: Target tokens in the global batch, 0-dim.
            nats: Sum of the losses of these, 0-dim.
            norm: Norm of the gradients summed over them, of scaled losses where there is a loss scale; 0-dim.

        Returns:
            Norm of the gradient of the mean loss per token before clipping, fp32, 0-dim.
        """
        divisor = tokens.float() * self.scale
        norm = norm.float() / divisor
        unusable = self._not_finite = (~torch.isfinite(norm)).float()
        if self._spikes is not None:
            unusable = torch.maximum(unusable, self._spikes.found(nats / tokens, norm))
        scale = divisor * (norm / self._config.clip).clamp(min=1.0) if self._config.clip else divisor
        # The fused kernel divides gradients by the one and does nothing where the other is 1: no pass of our own.
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = self._unusable = unusable  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self._steps, self._config)
        self.optimizer.step()
        self._stepped()
        self.optimizer.zero_grad()
        return norm

    def _stepped(self) -> None:
        self.done += 1
        self.skips += self._unusable
        self.skips[1] *= self._unusable
        if self._spikes is not None:
            self._spikes.stepped()
        if self._loss_scale is not None:
            self._loss_scale.update(self._not_finite)
            self.scale = self._loss_scale.value

    def state_dict(self) -> dict[str, Any]:
        """All but the optimizer's own states."""
        scaling = {} if self._loss_scale is None else self._loss_scale.state_dict()
        return {
            "skips": self.skips,
            "loss_scale": scaling,
            **({} if self._spikes is None else {"spikes": self._spikes.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned; what was not there begins anew."""
        self.skips.copy_(state["skips"])
        if self._spikes is not None and "spikes" in state:
            self._spikes.load_state_dict(state["spikes"])
        if self._loss_scale is not None and state["loss_scale"]:
            self._loss_scale.load_state_dict(state["loss_scale"])
            self.scale = self._loss_scale.value
