from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.data.samples import (
    IGNORED_TARGET,
    gather,
    global_batch,
    permute,
    sample_count,
    share,
    validation_share,
)

seeds = st.integers(0, 2**63)


@given(seeds, st.integers(0, 1000), st.integers(1, 700))
def test_permutation_is_a_bijection(seed: int, epoch: int, n: int) -> None:
    assert sorted(permute(seed, epoch, np.arange(n), n).tolist()) == list(range(n))


@given(seeds, st.integers(0, 1000), st.integers(1, 2**62), st.data())
def test_permutation_is_a_function_of_each_index_alone(seed: int, epoch: int, n: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    together = permute(seed, epoch, indices, n)
    alone = [permute(seed, epoch, indices[i : i + 1], n)[0] for i in range(len(indices))]
    assert together.tolist() == alone
    assert together.min() >= 0 and together.max() < n


def test_permutation_refuses_indices_outside() -> None:
    for outside in (-1, 10):
        with pytest.raises(ValueError, match="expected range"):
            permute(0, 0, np.array([3, outside]), 10)


def test_every_seed_and_epoch_has_an_order_of_its_own() -> None:
    orders = {tuple(permute(seed, epoch, np.arange(50), 50).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.full
@pytest.mark.parametrize("n", [3, 8, 24])
def test_every_item_is_equally_likely_at_every_place(n: int) -> None:
    epochs = 1500
    orders = np.stack([permute(7, epoch, np.arange(n), n) for epoch in range(epochs)])
    counts = np.stack([(orders == item).sum(0) for item in range(n)])
    chi_square = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    # For uniform permutations: mean n (n - 1), standard deviation about sqrt(2) (n - 1).
    assert chi_square < n * (n - 1) + 5 * np.sqrt(2) * n


@given(seeds, st.integers(1, 40), st.integers(1, 60), st.integers(0, 50))
def test_every_epoch_covers_all_samples_exactly_once(seed: int, batch: int, n: int, first: int) -> None:
    steps = range(first, first + 3 * n // batch + 2)
    stream = np.concatenate([global_batch(seed, step, batch, n) for step in steps])
    start = -(first * batch) % n
    epochs = [stream[at : at + n] for at in range(start, len(stream) - n + 1, n)]
    assert epochs
    assert all(sorted(epoch.tolist()) == list(range(n)) for epoch in epochs)


@given(seeds, st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 10**6))
def test_batch_size_does_not_change_the_order(seed: int, step: int, batch: int, n: int) -> None:
    together = global_batch(seed, step, 2 * batch, n)
    halves = [global_batch(seed, 2 * step, batch, n), global_batch(seed, 2 * step + 1, batch, n)]
    assert np.array_equal(together, np.concatenate(halves))


@given(st.integers(1, 12), st.integers(0, 50), st.integers(1, 9))
def test_ranks_share_a_batch_without_loss_in_equally_many_micro_batches(
    world_size: int, more: int, micro_batch: int
) -> None:
    indices = np.arange(100, 100 + world_size + more)
    ranks = [share(indices, rank, world_size, micro_batch) for rank in range(world_size)]
    assert np.concatenate([part for parts in ranks for part in parts]).tolist() == indices.tolist()
    sizes = [sum(map(len, parts)) for parts in ranks]
    assert max(sizes) - min(sizes) <= 1
    assert {len(parts) for parts in ranks} == {-(-max(sizes) // micro_batch)}
    for parts in ranks:
        lengths = [len(part) for part in parts]
        assert max(lengths) <= micro_batch and max(lengths) - min(lengths) <= 1


def test_a_smaller_share_may_end_in_an_empty_micro_batch() -> None:
    ranks = [share(np.arange(5), rank, 3, 1) for rank in range(3)]
    assert [[len(part) for part in parts] for parts in ranks].count([1, 1]) == 2
    assert sorted(len(part) for parts in ranks for part in parts) == [0, 1, 1, 1, 1, 1]


def test_more_ranks_than_samples_are_refused_with_both_ways_out() -> None:
    with pytest.raises(UserError, match="Raise the batch size to 4 or more, or use at most 3 workers"):
        share(np.arange(3), 0, 4, 1)


def test_ranks_that_do_not_exist_are_refused() -> None:
    for rank in (-1, 3):
        with pytest.raises(ValueError, match="does not exist"):
            share(np.arange(8), rank, 3, 1)


@given(st.integers(0, 200), st.integers(1, 30))
def test_samples_together_hold_every_target_once(count: int, context: int) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    n = sample_count(count, context)
    inputs, targets = gather(tokens, np.arange(n), context)
    assert inputs.shape == targets.shape == (n, context)
    real = targets != IGNORED_TARGET
    assert targets[real].tolist() == list(range(1, count))
    assert inputs[real].tolist() == list(range(max(count - 1, 0)))
    assert not inputs[~real].any()
    assert not n or real.any(axis=1).all()


@given(st.integers(0, 100), st.integers(1, 12))
def test_validation_samples_are_shared_once_and_in_order(n: int, world_size: int) -> None:
    shares = [validation_share(n, rank, world_size) for rank in range(world_size)]
    assert [index for part in shares for index in part] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
