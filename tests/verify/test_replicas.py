"""A bit that is flipped on one rank is found, in everything that others hold, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import SYSTEMS, Strategy
from tests.quick import full
from tests.train.processes import called

SMALL = {"bucket_mb": 1e-4}
HYBRID = Strategy(zero=2, shard=2, **SMALL)


def flip(tensor: Tensor) -> None:
    """Flips the lowest bit of the first element."""
    # Below what refuses views of optimizers' shards of states.
    with torch._C.DisableTorchFunctionSubclass():
        bits = tensor.detach().view(-1).view(torch.uint8)
    bits[0] ^= 1


def place(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> tuple[str, Tensor]:
    """The first trained parameter of which this rank has elements there, and these."""
    parameters = pl.engine_of(model).program.parameters
    for index, slot in enumerate(parameters.flat.layout.slots):
        if not slot.spec.trainable:
            continue
        if where == "as it is updated":
            kept = parameters.flat.local.get(index)
            tensor = parameters.all[index].data if kept is None else kept
        elif where == "as it is computed with":
            tensor = parameters.flat.views[index]
        else:
            tensor = optimizer.state[parameters.all[index]][where]
        if tensor.numel():
            return slot.spec.name, tensor
    raise AssertionError("this rank has no elements")


def trained(strategy: Strategy, where: str | None, on: int) -> tuple[int, str, str]:
    """What a check finds after two steps, the second time with a bit flipped on one rank."""
    world = pl.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.BatchNorm1d(32))
    model[0].bias.requires_grad_(False)
    pl.parallelize(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        torch.manual_seed(10 * step + world.rank)
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    compared = pl.check_replicas(model, optimizer)
    name = ""
    if where is not None and world.rank == on:
        name, tensor = place(model, optimizer, where)
        flip(tensor)
    try:
        pl.check_replicas(model, [optimizer])
    except EngineError as error:
        return compared, str(error), name
    return compared, "", name


FLIPS = [
    (Strategy(**SMALL), 3, "as it is updated", 1, "{} on rank 1. "),
    full(Strategy(**SMALL), 3, "exp_avg", 2, "{}'s exp_avg in AdamW on rank 2. "),
    full(Strategy(**SMALL), 3, "step", 0, "{}'s step in AdamW on rank 0. "),
    (Strategy(**SMALL), 2, "as it is updated", 1, "{} on rank 0, 1. "),
    full(Strategy(precision="bfloat16"), 3, "as it is updated", 1, "{} as it is updated on rank 1. "),
    full(Strategy(precision="bfloat16"), 3, "as it is computed with", 1, "{} as it is computed with on rank 1. "),
    full(Strategy(zero=1, **SMALL), 3, "as it is computed with", 0, "{} on rank 0. "),
    full(Strategy(zero=2, **SMALL), 3, "as it is computed with", 0, "{} on rank 0. "),
    (HYBRID, 4, "as it is updated", 3, "{} on rank 3. "),
    full(HYBRID, 4, "exp_avg_sq", 0, "{}'s exp_avg_sq in AdamW on rank 0, 2. "),
    full(Strategy(zero=3, shard=2, **SMALL), 4, "as it is updated", 2, "{} as it is updated on rank 0, 2. "),
    full(SYSTEMS["parameter server"], 3, "as it is updated", 2, "{} on rank 2. "),
]


@pytest.mark.parametrize(("strategy", "n", "where", "on", "words"), FLIPS)
def test_a_flipped_bit_is_found_and_the_rank_and_tensor_named(
    ranks, strategy: Strategy, n: int, where: str, on: int, words: str
) -> None:
    results = ranks(n, trained, strategy, where, on)
    assert all(compared > 0 for compared, _, _ in results)
    (told,) = {told for _, told, _ in results}
    assert told.startswith(f"replicas differ: {words.format(results[on][2])}"), told


@pytest.mark.parametrize(
    ("strategy", "n", "some"),
    [
        full(Strategy(**SMALL), 2, True),
        (Strategy(zero=1, share_parameters=True, **SMALL), 2, True),
        full(Strategy(zero=3, **SMALL), 2, False),
        full(Strategy(zero=3, shard=2, **SMALL), 4, True),
        full(SYSTEMS["parameter server"], 2, True),
        full(Strategy(), 1, False),
    ],
)
def test_what_is_whole_passes(ranks, strategy: Strategy, n: int, some: bool) -> None:
    assert all((compared > 0) == some and told == "" for compared, told, _ in ranks(n, trained, strategy, None, 0))


def test_the_trainer_checks_and_its_setting_is_checked(nano_once: list[str], tmp_path: Path) -> None:
    flags = [*nano_once, "--steps", "4", "--checkpoint.check-replicas", "2", "--checkpoint.every", "3"]
    status, _, err = called(tmp_path, "train", *flags, "--folder", "run")
    assert (status, err) == (0, "")
    status, _, err = called(tmp_path, "train", "--checkpoint.check-replicas", "-1")
    assert status == 2 and "checkpoint.check_replicas: expected 0 (none) or more steps, got -1" in err


@pytest.fixture
def nano_once(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("some words that are read again and again " * 400)
    return [
        *("--model.preset", "nano", "--data.vocabulary", "260", "--data.path", str(tmp_path / "text.txt")),
        *("--data.cache", str(tmp_path / "cache"), "--data.validation", "0.3", "--threads", "1"),
    ]


def edited(strategy: Strategy) -> str:
    """What a check says where every rank edited a parameter alike, so that its next update would lose it."""
    pl.init()
    torch.manual_seed(0)
    model = pl.parallelize(nn.Linear(8, 8), strategy)
    model.weight.data.mul_(2)
    with pytest.raises(EngineError) as caught:
        pl.check_replicas(model)
    return str(caught.value)


def test_what_all_ranks_edited_alike_is_refused_after_they_met(ranks) -> None:
    for told in ranks(2, edited, Strategy(precision="bfloat16", **SMALL)):
        assert told.startswith("weight was edited")
