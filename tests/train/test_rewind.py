"""A run that diverges goes back to a checkpoint, and on without the samples that led there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from paceline.data import loader, prepare
from paceline.data.config import DataConfig
from paceline.data.samples import gather, global_batch, sample_count
from paceline.launch.stop import StopRequest
from paceline.models.transformer import Transformer
from paceline.train import rewind
from paceline.train.config import TrainConfig
from paceline.train.former import Former
from paceline.train.sections import OptimConfig
from paceline.train.skipped import Diverged
from tests.ranks import RankPool
from tests.train.processes import metrics, trained
from tests.train.test_not_finite import forward_gives
from tests.train.test_resume import curve
from tests.train.test_samples import taken

FLAGS = ("--log.every", "1", "--log.validate-every", "0", "--log.validate-batches", "1", "--log.events-every", "0")
REWIND = (*FLAGS, "--optim.on-divergence", "rewind", "--steps", "24", "--checkpoint.every", "6")
BATCH, BACK, LEFT_OUT = 8, 6, 12
"""Of batches 8 to 17 one sample each is poisonous: the run goes back from step 18 to the checkpoint of step 6."""
POISONED = list(range(8, 18))


@contextmanager
def poisoned() -> Iterator[None]:
    """The loss of some samples, known by what they hold, is not a number."""
    forward = Transformer.forward

    def spoilt(tokens: Any, indices: Any, context: int) -> Any:
        samples = -(-(len(tokens) - 1) // context)
        poison = {int(global_batch(0, batch, BATCH, samples)[batch % BATCH]) for batch in POISONED}
        inputs, targets = gather(tokens, indices, context)
        inputs[[index in poison for index in indices.tolist()]] = 0
        return inputs, targets

    def failing(self: Transformer, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = forward(self, inputs, *args, **kwargs)
        return loss * torch.nan if args and bool((inputs == 0).all(1).any()) else loss

    with patch.object(loader, "gather", spoilt), patch.object(Transformer, "forward", failing):
        yield


@contextmanager
def poisoned_with_samples_left_out() -> Iterator[None]:
    """The same, but the samples that the run goes on without are not there to begin with."""

    def later(seed: int, step: int, *sizes: int) -> Any:
        return global_batch(seed, step + LEFT_OUT * (step >= BACK), *sizes)

    with poisoned(), patch.object(loader, "global_batch", later):
        yield


@pytest.mark.full
@pytest.mark.parametrize("zero", ["1", "3"])
def test_it_goes_on_as_if_the_samples_were_not_there(
    ranks: RankPool, nano: list[str], tmp_path: Path, zero: str
) -> None:
    flags = [*nano, *REWIND, "--strategy.zero", zero, "--log.samples"]
    status, _, err = trained(ranks, 2, tmp_path, [*flags, "--folder", "clean"], poisoned_with_samples_left_out)
    assert (status, err) == (0, ""), err
    status, out, err = trained(ranks, 2, tmp_path, [*flags, "--folder", "run"], poisoned)
    assert (status, err) == (0, ""), err
    assert "on without the samples of steps 7 to 18" in out
    run, clean = tmp_path / "run", tmp_path / "clean"
    assert curve(run) == curve(clean)
    weights, expected = load_file(run / "model.safetensors"), load_file(clean / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    figures = {int(line["step"]): line for line in metrics(run) if "train/loss" in line}
    rates = {int(line["step"]): line["train/learning_rate"] for line in metrics(clean) if "train/loss" in line}
    assert {step: line["train/learning_rate"] for step, line in figures.items()} == rates

    lines = [json.loads(line) for line in (run / "skipped.jsonl").read_text().splitlines()]
    left_out = [line for line in lines if "rewound_to" in line]
    assert [(line["step"], line["rewound_to"]) for line in left_out] == [(step, 6) for step in range(7, 19)]
    assert [line["step"] for line in lines if "norm" in line][:10] == list(range(9, 19))
    named = [number for line in left_out for rank in line["samples"] for part in rank for number in part]
    options = dict(zip(nano[::2], nano[1::2], strict=True))
    data = DataConfig((options["--data.path"],), vocabulary=300, validation=0.3, cache=options["--data.cache"])
    count = sample_count(prepare(data).facts.train.tokens, 64)
    batches = range(BACK, BACK + LEFT_OUT)
    order = [*range(BACK), *range(BACK + LEFT_OUT, 24 + LEFT_OUT)]
    assert taken(run) == {step: global_batch(0, batch, BATCH, count).tolist() for step, batch in enumerate(order, 1)}
    assert named == [number for batch in batches for number in global_batch(0, batch, BATCH, count).tolist()]

    # It is known to checkpoints, which another run goes on from.
    path = run / "checkpoints" / "step-00000018"
    before = curve(run)
    status, out, err = trained(ranks, 2, tmp_path, ["--resume", str(path)], poisoned)
    assert (status, err) == (0, "") and "going on after step 18" in out
    assert curve(run) == before


@contextmanager
def poisoned_twice() -> Iterator[None]:
    """The losses of batches 8 to 17 and of 32 to 41 are not numbers, nor of a few others that have samples of these."""
    with patch(f"{__name__}.POISONED", [*range(8, 18), *range(32, 42)]), poisoned():
        yield


@pytest.mark.full
def test_it_may_go_back_twice_and_go_on_with_another_number_of_ranks(
    ranks: RankPool, nano: list[str], tmp_path: Path
) -> None:
    flags = [*nano, *REWIND, "--steps", "36", "--checkpoint.keep", "5", "--log.samples", "--folder", "run"]
    status, out, err = trained(ranks, 2, tmp_path, flags, poisoned_twice)
    assert (status, err) == (0, ""), err
    # After 12 batches were left out, batch 32 is that of step 21.
    assert "on without the samples of steps 7 to 18" in out and "on without the samples of steps 19 to 30" in out
    run, options = tmp_path / "run", dict(zip(nano[::2], nano[1::2], strict=True))
    data = DataConfig((options["--data.path"],), vocabulary=300, validation=0.3, cache=options["--data.cache"])
    count = sample_count(prepare(data).facts.train.tokens, 64)
    order = [*range(6), *range(18, 30), *range(42, 60)]
    expected = {step: global_batch(0, batch, BATCH, count).tolist() for step, batch in enumerate(order, 1)}
    assert taken(run) == expected
    assert {path.name for path in (run / "checkpoints" / "replaced").iterdir()} >= {"step-00000012", "step-00000024"}
    before = curve(run)
    for folder, went_back in (("step-00000018", 1), ("step-00000024", 2)):
        path = run / "checkpoints" / folder
        if path.exists():
            status, out, err = trained(ranks, 1, tmp_path, ["--resume", str(path)], poisoned_twice)
            assert (status, err) == (0, ""), err
            assert taken(run) == expected, went_back
            for step, figures in curve(run).items():
                same = before[step] if None in before[step] else pytest.approx(before[step], rel=2e-3)
                assert figures == same, step


def never_finite_again() -> AbstractContextManager[None]:
    return forward_gives(lambda loss, call: loss * torch.nan if call > 8 else loss)


def test_it_stops_if_other_samples_do_no_better(ranks: RankPool, nano: list[str], tmp_path: Path) -> None:
    status, out, err = trained(ranks, 2, tmp_path, [*nano, *REWIND, "--folder", "run"], never_finite_again)
    assert status == 2 and "Traceback" not in err
    assert out.count("Going back to the checkpoint of step 6") == 1
    assert "has been back at step 6 before, and diverges with other samples, too" in err


def test_it_needs_a_checkpoint(ranks: RankPool, nano: list[str], tmp_path: Path) -> None:
    flags = [*nano, *REWIND, "--checkpoint.every", "9", "--folder", "run"]
    status, _, err = trained(ranks, 2, tmp_path, flags, never_finite_again)
    assert status == 2 and "Traceback" not in err
    assert "There is no checkpoint from before step 9 to go back to" in err


def test_it_stops_unless_asked_to_go_back(ranks: RankPool, nano: list[str], tmp_path: Path) -> None:
    flags = [*nano, *FLAGS, "--steps", "24", "--checkpoint.every", "6", "--folder", "run"]
    status, out, err = trained(ranks, 1, tmp_path, flags, never_finite_again)
    assert status == 2 and "in 10 steps in a row, the last of them step" in err and "Going back" not in out


def test_what_is_half_loaded_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    training: Any = SimpleNamespace(config=TrainConfig(optim=OptimConfig(on_divergence="rewind")))
    former, seen = Former(StopRequest()), list[Any]()

    def run(_: Any) -> int:
        seen.append(former.training)
        if len(seen) == 1:
            raise Diverged("it has diverged", 9, 18)
        return 0

    monkeypatch.setattr(rewind, "go_back", lambda *_: seen.append(former.training) or training)
    assert rewind.run_and_go_back(run, training, former) == 0
    assert seen == [training, None, training]
