"""What the examples share: a curve to learn and a small model in float64, so that all print the same loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Curve:
    """Points of a curve, in an order that is fixed for every step."""

    inputs: Tensor
    targets: Tensor

    def batch(self, step: int, device: torch.device, size: int = 16) -> tuple[Tensor, Tensor]:
        """The rows of one step, where they are computed with: (size, 1) inputs and targets."""
        rows = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(step))[:size]
        return self.inputs[rows].to(device), self.targets[rows].to(device)


_x = torch.linspace(-3, 3, 256, dtype=torch.float64)[:, None]
DATA = Curve(_x, torch.sin(2 * _x) + _x / 2)


def build_model(seed: int) -> nn.Module:
    """A small multilayer perceptron in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def evaluate(model: nn.Module) -> float:
    """Mean squared error over the whole curve."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return F.mse_loss(model(DATA.inputs.to(device)), DATA.targets.to(device)).item()
