from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.errors import UserError
from paceline.data import TokenFile
from paceline.data.loader import Loader, MicroBatch, StepBatch, validation_batches

CONTEXT = 8


def token_file(count: int) -> TokenFile:
    return TokenFile(Path("memory"), count, np.arange(count, dtype=np.uint16))


def steps(count: int, tokens: int = 100, **fields: object) -> list[StepBatch]:
    arguments = {"context": CONTEXT, "batch_size": 8, "micro_batch": 2, **fields}
    with Loader(token_file(tokens), **arguments) as loader:  # type: ignore[arg-type]
        return list(islice(loader, count))


def targets(step: StepBatch) -> list[int]:
    """All real targets of a step, sorted; tokens count up, so each stands for its place."""
    return sorted(torch.cat([batch.targets[batch.targets != -100] for batch in step]).tolist())


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_together_see_what_one_process_sees(world_size: int) -> None:
    alone = steps(6, seed=3)
    ranks = [steps(6, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)]
    for number, step in enumerate(alone):
        together = [batch for rank in ranks for batch in rank[number]]
        assert targets(together) == targets(step)
        assert sum(batch.tokens for batch in together) == len(targets(step))
        assert len({len(rank[number]) for rank in ranks}) == 1


def test_shapes_types_and_the_next_token() -> None:
    for batch in steps(1)[0]:
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.shape == batch.targets.shape == (2, CONTEXT)
        real = batch.targets != -100
        assert torch.equal(batch.inputs[real] + 1, batch.targets[real])
        assert batch.tokens == int(real.sum())


def test_an_epoch_holds_every_target_once() -> None:
    samples = -(-99 // CONTEXT)
    epoch = [batch for step in steps(samples, batch_size=1, micro_batch=1) for batch in step]
    assert targets(epoch) == list(range(1, 100))


def test_a_run_goes_on_where_it_stopped() -> None:
    whole = steps(6)
    rest = steps(3, first_step=3)
    for expected, step in zip(whole[3:], rest, strict=True):
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(expected, step, strict=True))


def test_an_empty_micro_batch_is_one_sample_without_targets() -> None:
    ranks = [steps(1, batch_size=5, micro_batch=1, rank=rank, world_size=3)[0] for rank in range(3)]
    empty = [batch for rank in ranks for batch in rank if batch.tokens == 0]
    assert len(empty) == 1
    assert empty[0].inputs.shape == (1, CONTEXT) and bool((empty[0].targets == -100).all())


class Torn:
    """Tokens whose file has become unreadable from some place on."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __len__(self) -> int:
        return 100

    def __getitem__(self, window: slice) -> np.ndarray:
        if window.start >= self.good:
            raise OSError("torn")
        return np.arange(100, dtype=np.uint16)[window]


def test_errors_of_the_thread_surface_in_next_again_and_again() -> None:
    torn = TokenFile(Path("torn"), 100, Torn(96))  # type: ignore[arg-type]
    with Loader(torn, context=CONTEXT, batch_size=1, micro_batch=1) as loader:
        with pytest.raises(OSError, match="torn"):
            list(islice(loader, 13))
        with pytest.raises(OSError, match="torn"):
            next(loader)


def test_close_ends_the_thread_wherever_it_stands() -> None:
    before = threading.active_count()
    for taken in range(4):
        loader = Loader(token_file(100), context=CONTEXT, batch_size=2, micro_batch=1)
        list(islice(loader, taken))
        loader.close()
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            next(loader)
    assert threading.active_count() == before


def test_wait_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*arguments: object, **fields: object) -> MicroBatch:
        release.wait()
        return MicroBatch(torch.zeros(1, 1), torch.zeros(1, 1), 1)

    monkeypatch.setattr("paceline.data.loader._micro_batch", slow)
    with Loader(token_file(100), context=CONTEXT, batch_size=1, micro_batch=1) as loader:
        threading.Timer(0.2, release.set).start()
        next(loader)
        assert 0.1 < loader.wait_seconds < 60


@pytest.mark.parametrize(
    ("tokens", "fields", "message"),
    [
        (8, {}, "8 tokens, but one sample needs 9.*shorter context"),
        (100, {"batch_size": 3, "world_size": 4}, "cannot be shared by 4 ranks"),
        (100, {"micro_batch": 0}, "at least 1 sample"),
    ],
)
def test_sizes_that_cannot_work_are_refused(tokens: int, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        steps(1, tokens, **fields)


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_validation_holds_every_target_once_over_the_ranks(world_size: int) -> None:
    batches = [
        batch
        for rank in range(world_size)
        for batch in validation_batches(
            token_file(100), context=CONTEXT, micro_batch=3, rank=rank, world_size=world_size
        )
    ]
    seen = torch.cat([batch.targets[batch.targets != -100] for batch in batches])
    assert seen.tolist() == list(range(1, 100))
    assert all(1 <= len(batch.inputs) <= 3 for batch in batches)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_gpu_unchanged() -> None:
    for there, here in zip(steps(5, device="cuda"), steps(5), strict=True):
        for a, b in zip(there, here, strict=True):
            assert a.inputs.is_cuda and a.targets.is_cuda
            assert torch.equal(a.inputs.cpu(), b.inputs) and torch.equal(a.targets.cpu(), b.targets)
