"""Models as people write them, trained by N ranks, equal a plain loop over the same parts of the batch in one process.

Parts, not the whole batch: BatchNorm normalises each part by itself, and the loss that balances experts is not a mean
over samples.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.layout import ROOT
from paceline.core.strategy import Strategy
from paceline.models.units import find_units, parameter_specs
from tests.engine.models import assert_same, snapshot
from tests.engine.real_models import FAMILIES, SHAPES, Batch, Family, loss_of
from tests.quick import diagonal, full
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


@pytest.mark.parametrize(("name", "mix"), diagonal(FAMILIES.keys(), MIXES, quick=QUICK))
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


# ---- in low precision

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
