from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.layout import Layout, ParameterSpec, build_layout
from paceline.schedule import COMPUTE, Schedule
from paceline.strategy import SYSTEMS, Strategy

UNITS = tuple(f"u{i}" for i in range(4))


def layout(strategy: Strategy, world_size: int, numel: int = 1024) -> Layout:
    specs = [ParameterSpec(f"{unit}.w", (numel,), (1,), "float32", 4, unit) for unit in UNITS]
    return build_layout(specs, UNITS, strategy, world_size)


def schedule(strategy: Strategy, world_size: int, rank: int = 0, **more) -> Schedule:
    return Schedule(layout(strategy, world_size), strategy, world_size, rank, UNITS, **more)


def names(ops, stream: str) -> list[str]:
    return [f"{op.kind} {op.target}" for op in ops if op.stream == stream]


ONE_BUCKET_EACH = Strategy(bucket_mb=1024 * 4 / 2**20)


def test_overlapped_buckets_are_reduced_between_the_backwards_they_wait_for() -> None:
    ops = schedule(ONE_BUCKET_EACH, 2).step(1)
    assert [f"{op.kind} {op.target}" for op in ops] == [
        *(f"forward u{i}" for i in range(4)),
        *("backward u3", "all_reduce bucket 0"),
        *("backward u2", "all_reduce bucket 1"),
        *("backward u1", "all_reduce bucket 2"),
        *("backward u0", "all_reduce bucket 3"),
        *("all_reduce counts", "update optimizer"),
    ]


def test_after_backward_every_bucket_waits_for_every_unit() -> None:
    ops = schedule(Strategy(synchronize="after", bucket_mb=ONE_BUCKET_EACH.bucket_mb), 2).step(1)
    reduces = [op for op in ops if op.stream == "reduce"]
    assert len(reduces) == 4
    assert all({key.target for key in op.after} == set(UNITS) for op in reduces)
    assert names(ops, "compute")[-1] == "update optimizer"


def test_only_the_last_micro_batch_communicates() -> None:
    ops = schedule(Strategy(), 3).step(4)
    assert {op.micro_batch for op in ops if op.kind not in COMPUTE} == {3}
    assert sum(op.kind == "forward" for op in ops) == 4 * len(UNITS)


def test_one_rank_communicates_nothing() -> None:
    assert all(op.kind in COMPUTE for op in schedule(Strategy(), 1).step(2))


def test_late_units_and_units_that_do_not_run_are_reduced_after_the_whole_backward() -> None:
    late = schedule(ONE_BUCKET_EACH, 2, late=frozenset({"u3"}))
    (reduce,) = [op for op in late.step(1) if op.target == "bucket 0"]
    assert {key.target for key in reduce.after} == set(UNITS)
    absent = Schedule(layout(ONE_BUCKET_EACH, 2), ONE_BUCKET_EACH, 2, 0, UNITS[1:])
    (reduce,) = [op for op in absent.step(1) if op.target == "bucket 3"]
    assert {key.target for key in reduce.after} == set(UNITS[1:])


@pytest.mark.parametrize("world_size", [2, 3, 8, 10])
def test_all_reduce_moves_2_parameters_times_n_minus_1_over_n(world_size: int) -> None:
    plan = schedule(Strategy(), world_size)
    buffer = sum(bucket.bytes for bucket in plan.layout.buckets)
    reduces = [op for op in plan.step(1) if op.stream == "reduce"]
    assert sum(op.sent for op in reduces) == 2 * (world_size - 1) * buffer // world_size
    assert sum(op.received for op in reduces) == sum(op.sent for op in reduces)


def test_the_parameter_server_receives_m_times_n_minus_1() -> None:
    strategy = SYSTEMS["parameter server"]
    for world_size in (2, 5, 10):
        server, client = (schedule(strategy, world_size, rank) for rank in (0, 1))
        size = server.layout.buckets[0].bytes
        in_server = [op for op in server.step(1) if op.kind == "reduce"]
        assert sum(op.received for op in in_server) == size * (world_size - 1)
        assert sum(op.sent for op in client.step(1) if op.kind == "reduce") == size
        assert sum(op.sent for op in server.step(1) if op.kind == "broadcast") == size * (world_size - 1)


@given(st.sampled_from(sorted(SYSTEMS)), st.integers(1, 6), st.integers(1, 4), st.sampled_from([1e-4, 0.004, 0.01, 25]))
def test_every_dependency_names_an_op_of_the_step_that_stands_before_it(system, world_size, micro_batches, mb) -> None:
    strategy = replace(SYSTEMS[system], bucket_mb=mb)
    seen = set()
    for op in schedule(strategy, world_size, rank=world_size - 1, counts=9).step(micro_batches):
        assert op.key not in seen, "an op occurs once"
        assert set(op.after) <= seen
        seen.add(op.key)
