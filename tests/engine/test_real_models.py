"""Models as people write them, trained by N ranks, equal a plain loop over the same parts of the batch in one process.

Parts, not the whole batch: BatchNorm normalises each part by itself, and the loss that balances experts is not a mean
over samples.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.layout import ROOT
from paceline.core.strategy import Strategy
from paceline.models.units import find_units, parameter_specs
from tests.engine.models import assert_same, snapshot
from tests.engine.real_models import FAMILIES, SHAPES, Batch, Family, loss_of
from tests.quick import full, in_turn
from tests.ranks import RankPool

STEPS = 2
SAMPLES = 2
"""In a micro-batch of one rank."""
MAX_NORM = 0.5
BUCKET_MB = 0.004
STRATEGIES = {
    "zero 0": Strategy(bucket_mb=BUCKET_MB),
    "zero 1": Strategy(zero=1, bucket_mb=BUCKET_MB),
    "zero 2": Strategy(zero=2, bucket_mb=BUCKET_MB),
    "zero 3": Strategy(zero=3),
    "hybrid": Strategy(zero=3, shard=2),
}


def optimizer_for(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    # A large eps: what is zero but for rounding (GPT-2's key biases) must not become a whole step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def micro_batches(family: Family, step: int, n: int, accumulation: int) -> list[list[Batch]]:
    """Of each rank."""
    batch = family.batch(step, n * accumulation * SAMPLES)
    starts = range(0, n * accumulation * SAMPLES, SAMPLES)
    parts = [{name: value[start : start + SAMPLES] for name, value in batch.items()} for start in starts]
    return [parts[rank * accumulation : (rank + 1) * accumulation] for rank in range(n)]


def evaluated(family: Family, model: nn.Module) -> list[float]:
    """What is computed between two steps: a loss, and greedily generated tokens where the model can."""
    batch = family.batch(999, 2)
    model.eval()
    with torch.no_grad():
        values = [loss_of(model, batch).item()]
    if family.generates:
        generated: Tensor = model.generate(batch["input_ids"][:, :3], max_new_tokens=4, do_sample=False)  # type: ignore[operator]
        values += generated.flatten().tolist()
    model.train()
    return values


def train(name: str, shape: str, strategy: Strategy, accumulation: int, kind: str) -> dict[str, Any]:
    """What one rank saw: losses (means over ranks), norms, values in evaluation, and the whole model at the end."""
    world, family = pl.init(), FAMILIES[name]
    model = family.make(seed=world.rank)  # other ranks start elsewhere: the broadcast must mend it
    SHAPES[shape](model)
    engine = pl.engine_of(pl.parallelize(model, strategy))
    optimizer = optimizer_for(kind, model)
    losses, norms, values = [], [], []
    for step in range(STEPS):
        mine = micro_batches(family, step, world.world_size, accumulation)[world.rank]
        for batch in pl.accumulate(model, mine):
            loss = loss_of(model, batch) / accumulation
            engine.count(loss)
            loss.backward()
        losses.append(engine.counts().item() / world.world_size)
        norms.append(pl.clip_grad_norm_(model, MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        values.append(evaluated(family, model))
    with pl.full_parameters(model):
        state = snapshot(model)
    buckets = len(engine.layout.buckets)
    pl.release(model)
    return {"losses": losses, "norms": norms, "values": values, "state": state, "buckets": buckets}


@functools.cache
def reference(name: str, shape: str, n: int, accumulation: int, kind: str) -> list[dict[str, Any]]:
    """The same in plain PyTorch: one process plays each rank in turn, with that rank's buffers within a step."""
    family = FAMILIES[name]
    model = family.make()
    SHAPES[shape](model)
    optimizer = optimizer_for(kind, model)
    results: list[dict[str, Any]] = [{"losses": [], "norms": [], "values": []} for _ in range(n)]
    buffers = [[buffer.clone() for buffer in model.buffers()] for _ in range(n)]

    def play(rank: int) -> None:
        for buffer, value in zip(model.buffers(), buffers[rank], strict=True):
            buffer.copy_(value)

    for step in range(STEPS):
        total = 0.0
        for rank, mine in enumerate(micro_batches(family, step, n, accumulation)):
            play(rank)
            for batch in mine:
                loss = loss_of(model, batch) / (n * accumulation)
                loss.backward()
                total += loss.item()
            buffers[rank] = [buffer.clone() for buffer in model.buffers()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        optimizer.step()
        optimizer.zero_grad()
        buffers = [buffers[0]] * n
        for rank, result in enumerate(results):
            play(rank)
            result["losses"].append(total)
            result["norms"].append(norm)
            result["values"].append(evaluated(family, model))
            result["state"] = snapshot(model)
    return results


def assert_equal_to_one_process(
    ranks: RankPool, name: str, shape: str, strategy: str, n: int, accumulation: int, kind: str
) -> None:
    tolerance = FAMILIES[name].tolerance
    expected = reference(name, shape, n, accumulation, kind)
    results = ranks(n, train, name, shape, STRATEGIES[strategy], accumulation, kind)
    for result, wanted in zip(results, expected, strict=True):
        assert result["buckets"] > 2
        for key in ("losses", "norms"):
            assert result[key] == pytest.approx(wanted[key], abs=tolerance, rel=0), key
        for seen, value in zip(result["values"], wanted["values"], strict=True):
            assert seen == pytest.approx(value, abs=tolerance, rel=0)
        assert_same(result["state"], wanted["state"], atol=tolerance)


MIXES = {
    f"{mix[0]}, N={mix[1]}": mix
    for mix in (
        ("zero 3", 2, 1, "sgd"),
        ("zero 2", 2, 2, "adamw"),
        ("zero 3", 3, 2, "adamw"),
        ("zero 1", 2, 2, "sgd"),
        ("zero 0", 2, 1, "adamw"),
    )
}


QUICK = {
    ("gpt2", "zero 3, N=2"),
    ("switch", "zero 2, N=2"),
    ("vit", "zero 3, N=3"),
    ("resnet", "zero 0, N=2"),
    ("lstm", "zero 1, N=2"),
}
"""Each kind of model, in which ranks of three import nothing that takes long."""


@pytest.mark.parametrize(("name", "mix"), in_turn(FAMILIES.keys(), MIXES, times=3, quick=QUICK))
def test_training_equals_one_process(ranks: RankPool, name: str, mix: tuple[str, int, int, str]) -> None:
    assert_equal_to_one_process(ranks, name, "as it is", *mix)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "switch", "resnet"])
def test_groups_of_ranks_that_shard_and_replicate_equal_one_process(ranks: RankPool, name: str) -> None:
    assert_equal_to_one_process(ranks, name, "as it is", "hybrid", 4, 2, "adamw")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*deprecated")
@pytest.mark.parametrize(
    ("name", "shape", "strategy"),
    [
        ("gpt2", "reentrant checkpoints", "zero 3"),
        full("llama", "checkpoints, middle frozen", "zero 3"),
        full("mixtral", "middle frozen", "zero 1"),
        ("t5", "checkpoints, middle frozen", "zero 2"),
        full("t5", "middle frozen", "zero 3"),
    ],
)
def test_checkpointed_and_partly_frozen_models_equal_one_process(
    ranks: RankPool, name: str, shape: str, strategy: str
) -> None:
    assert_equal_to_one_process(ranks, name, shape, strategy, 2, 1, "adamw")


@pytest.mark.parametrize("name", FAMILIES)
def test_units_are_blocks_and_what_is_left(name: str) -> None:
    family = FAMILIES[name]
    model = family.make()
    units = list(find_units(model))
    assert units == family.units
    specs = parameter_specs(model, units)
    assert [spec.name for spec in specs if spec.unit == ROOT] == family.shared


@pytest.mark.parametrize("name", ["mixtral", "switch"])
def test_the_mixtures_tested_have_experts_that_no_token_chooses(name: str) -> None:
    family = FAMILIES[name]
    model = family.make()
    loss_of(model, family.batch(0, 3 * SAMPLES)).backward()
    experts = [p for key, p in model.named_parameters() if ".experts." in key]
    if name == "mixtral":  # one parameter holds all experts of a block
        assert any((p.grad.flatten(1) == 0).all(1).any() for p in experts if p.grad is not None)
    else:
        assert any(p.grad is None for p in experts) and any(p.grad is not None for p in experts)
