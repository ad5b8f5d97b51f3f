"""What loops do with optimizers' states between steps where ranks have shards of them: it is what one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.comm.transport import CommunicationError
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.engine.models import HYBRID, STAGES, assert_same, shares
from tests.quick import in_turn

Edit = Callable[[torch.optim.Optimizer, nn.Module, dict[str, Any], int], Any]
"""(optimizer, model, what it has kept, step): what it has seen, numbers."""


def norms(optimizer, model, kept, step) -> Any:
    return [[float(optimizer.state[p][name].norm()) for name in ("exp_avg", "exp_avg_sq")] for p in model.parameters()]


def of_all_items(optimizer, model, kept, step) -> Any:
    return [
        (list(state.shape), float(state.sum()), float(state.abs().max()), int((state > 0).sum()))
        for states in optimizer.state.values()
        for name, state in states.items()
        if name != "step"
    ]


def dead_rows(optimizer, model, kept, step) -> Any:
    """As who trains sparse autoencoders begins dead features anew."""
    for p in model.parameters():
        dead = torch.arange(len(p)) % 3 == step % 3
        optimizer.state[p]["exp_avg"][dead] = 0
        optimizer.state[p]["exp_avg_sq"][~dead] *= 0.5


def rows_in_views(optimizer, model, kept, step) -> Any:
    for p in model.parameters():
        average = optimizer.state[p]["exp_avg"]
        average[0].mul_(3)
        average[-1] += 0.1
        average.view(-1)[1::2] = 0
        average.data[0] *= 0.5
        average.T.add_(0.01)


def masked(optimizer, model, kept, step) -> Any:
    torch.manual_seed(step)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].mul_((torch.rand(p.shape) > 0.5).to(p.dtype))


def with_gradients(optimizer, model, kept, step) -> Any:
    seen = []
    for p in model.parameters():
        average = optimizer.state[p]["exp_avg"]
        seen.append(float(F.cosine_similarity(average.flatten(), p.grad.flatten(), dim=0)))
        average.add_(p.grad, alpha=0.1)
        p.grad.mul_(average)
        seen.append(float((average * p.grad).sum()))
    return seen


def with_weights(optimizer, model, kept, step) -> Any:
    with pl.full_parameters(model) if hasattr(model, "no_sync") else nullcontext():
        return [float((optimizer.state[p]["exp_avg"] * p.detach()).sum()) for p in model.parameters()]


def scaled(optimizer, model, kept, step) -> Any:
    for states in optimizer.state.values():
        states["exp_avg"].mul_(0.5)
    torch._foreach_mul_([optimizer.state[p]["exp_avg_sq"] for p in model.parameters()], 2.0)
    averages = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    halves, roots = torch._foreach_mul(averages, 0.5), torch._foreach_sqrt(torch._foreach_abs(averages))
    return [float(each) for each in torch._foreach_norm(averages)], [float(each.sum()) for each in (*halves, *roots)]


def aliases(optimizer, model, kept, step) -> Any:
    seen = []
    for p in model.parameters():
        average = optimizer.state[p]["exp_avg"]
        row, data = average[0], average.data
        data.mul_(0.5)
        try:
            row.zero_()
        except EngineError:
            average[0] = 0
        seen.append(float(data.sum()))
    return seen


def kept_and_put_back(optimizer, model, kept, step) -> Any:
    if step == 0:
        kept["states"] = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
        kept["same"] = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    if step == 2:
        for p, before in zip(model.parameters(), kept["states"], strict=True):
            optimizer.state[p]["exp_avg"].copy_(before)
    return [float(each.sum()) for each in kept["same"]]


def given_whole_ones(optimizer, model, kept, step) -> Any:
    torch.manual_seed(step)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].copy_(torch.randn_like(p))
        optimizer.state[p]["exp_avg_sq"].data = torch.rand(p.shape, dtype=p.dtype)


def replaced_by_whole_ones(optimizer, model, kept, step) -> Any:
    torch.manual_seed(step)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"] = torch.randn_like(p)


def described(optimizer, model, kept, step) -> Any:
    for p in model.parameters():
        state = optimizer.state[p]["exp_avg"]
        assert state.shape == p.shape and len(state) == len(p) and state.numel() == p.numel() and state.dim() == p.dim()
    return [optimizer.state[p]["exp_avg"].numpy().tolist() for p in model.parameters()], [
        torch.quantile(optimizer.state[p]["exp_avg_sq"], 0.5).item() for p in model.parameters()
    ]


def copied_and_loaded(optimizer, model, kept, step) -> Any:
    seen = norms(optimizer, model, kept, step)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return seen


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        *(norms, of_all_items, dead_rows, rows_in_views, masked, with_gradients, with_weights, scaled),
        *(kept_and_put_back, aliases, given_whole_ones, replaced_by_whole_ones, described, copied_and_loaded),
    )
}


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.05),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "Adam of groups": lambda model: torch.optim.Adam(
        # Of the first some rank has no part.
        [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2:].parameters(), "weight_decay": 0.1}],
        0.01,
    ),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), 0.01, centered=True, momentum=0.5),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), 0.01),
}


def rewritten(optimizer, model, kept, step) -> Any:
    """All states of elements, in every way."""
    seen = []
    for p in model.parameters():
        states = optimizer.state[p]
        for name in ("exp_avg", "exp_avg_sq", "sum", "momentum_buffer", "square_avg", "grad_avg", "prev", "step_size"):
            if name in states:
                state = states[name]
                seen += [float(state.norm()), float(state.var())]
                state[0] = state[-1] * 0.5
                state.flatten()[1] += 0.1
                state.clamp_(max=float(state.max()) * 0.9)
                state.copy_(state.clone().view(p.shape) * 1.01)
                torch.add(state, 0.001, out=state)
                if step == 1:
                    states[name] = state.clone()
                if step == 2:
                    states[name] = torch.full(p.shape, 0.3, dtype=p.dtype)
    return seen


def trained(strategy: Strategy | None, name: str) -> tuple[dict[str, Tensor], list[Any]]:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).double()
    if strategy is not None:
        pl.parallelize(model, strategy)
    make = OPTIMIZERS.get(name, lambda model: torch.optim.AdamW(model.parameters(), 0.01))
    optimizer, edit = make(model), EDITS.get(name, rewritten)
    generator, kept, seen = torch.Generator().manual_seed(1), dict[str, Any](), []
    for step in range(4):
        x, y = (torch.randn(24, n, generator=generator, dtype=torch.float64) for n in (6, 3))
        x, y = (shares(x), shares(y)) if strategy is not None else (x, y)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        seen.append(edit(optimizer, model, kept, step))
        optimizer.zero_grad()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    if strategy is not None:
        pl.release(model)
    return state, seen


PLACES = {
    "zero 1, N=2": (STAGES["zero 1"], 2),
    "zero 2, N=3": (STAGES["zero 2"], 3),
    "zero 3, N=2": (STAGES["zero 3"], 2),
    "zero 2, shared parameters, N=2": (replace(STAGES["zero 2"], share_parameters=True), 2),
    "zero 2, 2 x 2": (HYBRID["zero 2, 2 x 2"], 4),
}


def flat(seen: Any) -> list[float]:
    return [each for part in seen for each in flat(part)] if isinstance(seen, (list, tuple)) else [seen or 0.0]


@pytest.mark.parametrize(
    ("name", "place"),
    in_turn([*EDITS, *OPTIMIZERS], PLACES, times=3, quick={(name, "zero 2, N=3") for name in EDITS}),
)
def test_what_is_done_to_states_is_what_one_process_does(ranks, place, name) -> None:
    strategy, count = place
    expected, wanted = trained(None, name)
    for state, seen in ranks(count, trained, strategy, name):
        assert flat(seen) == pytest.approx(flat(wanted))
        assert_same(state, expected)


def taken_before_a_step(strategy: Strategy) -> list[str]:
    model = pl.parallelize(nn.Linear(6, 4), strategy)
    optimizer, told = torch.optim.Adam(model.parameters()), []
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    average = optimizer.state[model.weight]["exp_avg"]
    first, second = average[0], average[1]
    first.zero_()
    for edits in (lambda: second.zero_(), lambda: second.sum(), lambda: average.numpy().fill(0)):
        with pytest.raises((EngineError, ValueError)) as refused:
            edits()
        told.append(str(refused.value))
    assert not average[0].any() and average[1].all()
    row = average[1]
    optimizer.step()
    with pytest.raises(EngineError) as refused:
        row.zero_()
    told.append(str(refused.value))
    pl.release(model)
    return told


@pytest.mark.parametrize("zero", [1, 3])
def test_rows_of_before_a_change_and_arrays_are_refused(ranks, zero: int) -> None:
    old = "exp_avg of weight: this part of it was taken before it changed, by a step or by another write: take it anew"
    for told in ranks(2, taken_before_a_step, STAGES[f"zero {zero}"]):
        assert told[:2] == [old] * 2 and "read-only" in told[2] and told[3] == old


def read_by_rank_0(strategy: Strategy) -> str:
    model = pl.parallelize(nn.Linear(6, 4), strategy)
    optimizer = torch.optim.Adam(model.parameters())
    try:
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            if pl.init().rank == 0:
                optimizer.state[model.weight]["exp_avg"].norm()
    except CommunicationError as error:
        pl.shutdown()
        return str(error)
    return ""


def test_a_rank_that_looks_alone_is_told(ranks) -> None:
    alone, other = ranks(2, read_by_rank_0, STAGES["zero 2"])
    assert "exp_avg of weight (norm)" in alone and "every rank must do so, and one may print that" in alone
    assert "exp_avg of weight (norm)" in other
