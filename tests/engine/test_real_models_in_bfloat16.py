"""Models as people write them, trained in bfloat16: sharded ones equal whole replicas, and these one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.strategy import Strategy
from tests.engine.models import assert_same, snapshot
from tests.engine.real_models import FAMILIES, Batch
from tests.engine.test_real_models import SAMPLES, STEPS, STRATEGIES, optimizer_for
from tests.ranks import RankPool

LOW_TOLERANCE = {2: 0.0, 4: 2e-3}
"""How far losses and weights may be from those at zero 0, by the number of ranks: two gradients have one sum in either
order. Of four, groups add up others first, and that last bit of a sum in fp32 can be one of the 8 bits of a weight."""


def built_in_float32(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = FAMILIES[name].build()
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.dtype = torch.float32  # type: ignore[assignment]  # what a router computes in
    return model


def padded(name: str, step: int, rank: int, n: int) -> Batch:
    """A rank's part of a batch; of every other sentence the end is padding, so that models build masks in a dtype."""
    whole = FAMILIES[name].batch(step, n * SAMPLES)
    batch = {key: value[rank * SAMPLES : (rank + 1) * SAMPLES] for key, value in whole.items()}
    if "input_ids" in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][::2, 5:] = 0
    return {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}


def low_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, torch.dtype]:
    """As `loss_of`, in float32; and the dtype of what the model computed."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    output = model(**inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    loss = F.cross_entropy(logits.float().flatten(0, -2), batch["labels"].flatten())
    balance = getattr(output, "aux_loss", None)
    return loss if balance is None else loss + balance, logits.dtype


def train_low(name: str, strategy: Strategy) -> tuple[list[float], dict[str, Tensor], set[torch.dtype]]:
    """Losses of this rank, the fp32 weights at the end, and the dtypes of what the model computed."""
    world = pl.init()
    model = pl.parallelize(built_in_float32(name, seed=world.rank), strategy)
    optimizer = optimizer_for("adamw", model)
    losses, dtypes = [], set()
    for step in range(STEPS):
        loss, dtype = low_loss(model, padded(name, step, world.rank, world.world_size))
        dtypes.add(dtype)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with pl.full_parameters(model):
        state = snapshot(model)
    pl.release(model)
    return losses, state, dtypes


LOW = [
    *(
        pytest.param(name, "zero 3", 2, marks=() if name in ("switch", "resnet") else pytest.mark.full)
        for name in FAMILIES
    ),
    # Half of the families at each: what differs between these stages is no family's.
    *(
        pytest.param(name, strategy, 2, marks=pytest.mark.other_worlds)
        for name, strategy in zip(FAMILIES, cycle(("zero 1", "zero 2")))
    ),
    *(pytest.param(name, "hybrid", 4, marks=pytest.mark.other_worlds) for name in ("gpt2", "switch")),
]


@pytest.mark.parametrize(("name", "strategy", "n"), LOW)
def test_sharded_training_in_bfloat16_is_that_of_whole_replicas(
    ranks: RankPool, name: str, strategy: str, n: int
) -> None:
    low = {key: replace(STRATEGIES[key], precision="bfloat16") for key in ("zero 0", strategy)}
    expected = ranks(n, train_low, name, low["zero 0"])
    for (losses, state, dtypes), (wanted, whole, _) in zip(
        ranks(n, train_low, name, low[strategy]), expected, strict=True
    ):
        assert dtypes == {torch.bfloat16}
        assert losses == pytest.approx(wanted, abs=LOW_TOLERANCE[n], rel=0)
        assert_same(state, whole, atol=LOW_TOLERANCE[n])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("gpt2", "switch", "resnet") else pytest.mark.other_worlds)
        for name in FAMILIES
    ],
)
def test_training_in_bfloat16_equals_one_process(ranks: RankPool, name: str) -> None:
    """Copies of an fp32 model's weights to compute with, and fp32 sums of their gradients, in plain PyTorch."""
    master, copied = built_in_float32(name, 0), built_in_float32(name, 0)
    uncast = {p for norm in copied.modules() if isinstance(norm, nn.BatchNorm2d) for p in norm.parameters()}
    optimizer = optimizer_for("adamw", master)
    expected: list[list[float]] = [[], []]
    for step in range(STEPS):
        for low, one in zip(copied.parameters(), master.parameters(), strict=True):
            # Data, as a router has cast its own to float32. Not `copied.to`: buffers stay what they are.
            low.data = one.data.clone() if low in uncast else one.data.to(torch.bfloat16)
        for rank in range(2):
            batch = padded(name, step, rank, 2)
            loss, _ = low_loss(copied, {key: v.bfloat16() if v.is_floating_point() else v for key, v in batch.items()})
            expected[rank].append(loss.item())
            loss.backward()
            for low, one in zip(copied.parameters(), master.parameters(), strict=True):
                if low.grad is not None:
                    one.grad = low.grad.float() / 2 + (0 if one.grad is None else one.grad)
            copied.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    results = ranks(2, train_low, name, replace(STRATEGIES["zero 3"], precision="bfloat16"))
    for (losses, state, _), wanted in zip(results, expected, strict=True):
        assert losses == pytest.approx(wanted, abs=1e-5, rel=0)
        # Without buffers: BatchNorm's statistics are rank 0's.
        weights = {name: parameter.detach() for name, parameter in master.named_parameters()}
        assert_same({name: state[name] for name in weights}, weights, atol=1e-5)
