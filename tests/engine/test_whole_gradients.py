"""What loops do with whole gradients where ranks have shards of them: it is what one process does."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import HYBRID, STAGES, assert_same, shares
from tests.quick import in_turn

Parameters = Sequence[nn.Parameter]
Edit = Callable[[Parameters, dict[str, Any], int], Any]
"""(parameters, what it has kept, step): what it has seen, numbers."""


def totals(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    return [(float(p.grad.sum()), float(p.grad.abs().max()), int((p.grad > 0).sum())) for p in parameters]


def rows_masked(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p in parameters:
        p.grad[::2] = 0
        p.grad.view(-1)[-1] = 1


def views(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p in parameters:
        p.grad.mul_(0.5)
        row, data, apart = p.grad[0], p.grad.data, p.grad.detach()
        row.mul_(3)
        data[-1] += 1
        apart.view(-1)[0] = 0


def noise(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    torch.manual_seed(step)
    for p in parameters:
        p.grad += 0.1 * torch.randn_like(p.grad)


def clipped_by_the_largest(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    return float(nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=float("inf")))


def clipped_after_an_edit(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    torch._foreach_mul_([p.grad for p in parameters], 1.5)
    return float(nn.utils.clip_grad_norm_(parameters, 0.1))


def centred(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p in parameters:
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def averaged(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    """Averages that begin as shards, to which whole ones are added later."""
    for index, p in enumerate(parameters):
        average = kept.setdefault(index, torch.zeros_like(p.grad))
        average.mul_(0.9).add_(p.grad)
        p.grad.lerp_(average, 0.5)
        if step == 1:
            average += torch.ones(p.shape, dtype=p.grad.dtype)


def as_one_vector(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    vector = torch.cat([p.grad.reshape(-1) for p in parameters])
    vector = vector / (vector.norm() + 0.1)
    for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view(p.shape))


def of_each_other(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    """Gradients of two layers of one shape are exchanged, and scaled by another's norm."""
    first, second = (p for p in parameters if p.shape == (5, 5))
    first.grad, second.grad = second.grad, first.grad
    parameters[0].grad.mul_(parameters[1].grad.norm())


def projected(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    """PCGrad's: against the gradients of the step before."""
    mine = torch.cat([p.grad.flatten() for p in parameters])
    other = kept.get("before", torch.ones_like(mine))
    kept["before"] = mine.clone()
    if (dot := mine.dot(other)) < 0:
        mine = mine - dot / other.dot(other) * other
    for p, part in zip(parameters, mine.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view(p.shape).clone()


def saved(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    sink = io.BytesIO()
    torch.save([p.grad for p in parameters], sink)
    sink.seek(0)
    return [float(each.sum()) for each in torch.load(sink)]


def described(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    assert all(p.grad.shape == p.shape and p.grad.dim() == p.dim() and len(p.grad) == len(p) for p in parameters)
    return [float(p.grad.numpy().sum()) for p in parameters], [p.grad.T.tolist() for p in parameters]


def largest_alone(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p in parameters:
        least = p.grad.abs().flatten().topk(2).values[-1]
        p.grad[p.grad.abs() < least] = 0


def given_other_data(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p in parameters:
        p.grad.data = p.grad.data + 0.1


def mapped(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p in parameters:
        p.grad.copy_(torch.vmap(lambda row: row * 2 + row.sum())(p.grad))


def kept_from_the_first(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p, gradient in zip(parameters, kept.setdefault("all", [p.grad for p in parameters]), strict=True):
        (gradient if gradient is p.grad else p.grad)[0] = 0


def unscaled_by_torch(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))


def decayed_by_hand(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    for p in parameters:
        p.grad.add_(p.data, alpha=0.1)


def descended_by_hand(parameters: Parameters, kept: dict[str, Any], step: int) -> Any:
    with torch.no_grad():
        for p in parameters:
            p -= 0.1 * p.grad / (1 + p.grad.norm())


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        *(totals, rows_masked, views, noise, clipped_by_the_largest, clipped_after_an_edit, centred, averaged),
        *(as_one_vector, of_each_other, projected, saved, described, largest_alone, given_other_data, mapped),
        *(kept_from_the_first, unscaled_by_torch),
    )
}
OF_WEIGHTS: dict[str, Edit] = {edit.__name__: edit for edit in (decayed_by_hand, descended_by_hand)}
"""These read or write the weights between steps, too, which are there to be read up to zero 2."""


def trained(strategy: Strategy | None, name: str, drops: bool, micro: int) -> tuple[dict[str, Tensor], list[Any]]:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).double()
    parameters = list(model.parameters())
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.AdamW(parameters, 0.01) if drops else torch.optim.SGD(parameters, 0.1, momentum=0.9)
    generator, kept, seen = torch.Generator().manual_seed(1), dict[str, Any](), []
    for step in range(3):
        x, y = (torch.randn(24, n, generator=generator, dtype=torch.float64) for n in (6, 3))
        x, y = (shares(x), shares(y)) if strategy is not None else (x, y)
        optimizer.zero_grad(set_to_none=drops)
        batches = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        for part, wanted in pl.accumulate(model, batches) if strategy is not None else batches:
            F.mse_loss(model(part), wanted).div(micro).backward()
        seen.append({**EDITS, **OF_WEIGHTS}[name](parameters, kept, step))
        optimizer.step()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    if strategy is not None:
        pl.release(model)
    return state, seen


def all_trained(
    strategy: Strategy, cases: Sequence[tuple[str, bool]], micro: int
) -> list[tuple[dict[str, Tensor], list[Any]]]:
    return [trained(strategy, name, drops, micro) for name, drops in cases]


PLACES = {
    "zero 1, N=2": (STAGES["zero 1"], 2),
    "zero 2, N=3": (STAGES["zero 2"], 3),
    "zero 3, N=2": (STAGES["zero 3"], 2),
    "zero 1, shared parameters, N=2": (replace(STAGES["zero 1"], share_parameters=True), 2),
    "zero 2, 2 x 2": (HYBRID["zero 2, 2 x 2"], 4),
}


def flat(seen: Any) -> list[float]:
    return [each for part in seen for each in flat(part)] if isinstance(seen, (list, tuple)) else [seen or 0.0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("place", "micro"),
    in_turn(
        PLACES,
        {"1 micro-batch": 1, "2 micro-batches": 2},
        times=1,
        quick={("zero 2, N=3", "2 micro-batches")},
    ),
)
def test_what_is_done_to_whole_gradients_is_what_one_process_does(ranks, place, micro) -> None:
    strategy, count = place
    # Elsewhere weights that are read or written between steps are refused: see the idioms.
    names = [*EDITS, *(OF_WEIGHTS if strategy.zero < 3 and not strategy.share_parameters else ())]
    # Each edit where gradients are dropped before the next step and where they are zeroed, in turn.
    cases = [(name, (index + strategy.zero + micro) % 2 == 0) for index, name in enumerate(names)]
    found = ranks(count, all_trained, strategy, cases, micro, timeout=200)
    for number, (name, drops) in enumerate(cases):
        expected, wanted = trained(None, name, drops, 1)
        for of_rank in found:
            state, seen = of_rank[number]
            assert_same(state, expected)
            assert flat(seen) == pytest.approx(flat(wanted)), (name, drops)


def between_micro_batches(strategy: Strategy) -> tuple[dict[str, Tensor], str]:
    """Rows are masked after the first of two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    pl.parallelize(model, strategy)
    told = ""
    for number in range(2):
        x = shares(torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number)))
        if number:
            model(x).square().mean().backward()
            break
        with pl.engine_of(model).no_sync():
            model(x).square().mean().backward()
        try:
            model[0].weight.grad[::2] = 0
        except EngineError as error:
            told = str(error)
    torch.optim.SGD(model.parameters(), 0.1).step()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    pl.release(model)
    return state, told


def test_between_micro_batches_they_are_what_was_reduced_so_far(ranks) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    for number in range(2):
        x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        if not number:
            model[0].weight.grad[::2] = 0
    torch.optim.SGD(model.parameters(), 0.1).step()
    for state, told in ranks(2, between_micro_batches, STAGES["zero 2"]):
        assert not told
        assert_same(state, model.state_dict())
    for _, told in ranks(4, between_micro_batches, HYBRID["zero 2, 2 x 2"]):
        assert "not reduced among all ranks yet" in told
