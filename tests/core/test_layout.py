from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.build_layout import build_layout
from paceline.core.layout import ALIGNMENT, ROOT, Layout, ParameterSpec
from paceline.core.strategy import Strategy
from tests.drawn import UNITS, layouts, models, spec, strategies


@given(models(), st.data())
def test_every_parameter_has_one_aligned_place_and_no_two_overlap(specs: list[ParameterSpec], data) -> None:
    world_size = data.draw(st.integers(1, 8))
    layout = build_layout(specs, UNITS, data.draw(strategies(world_size)), world_size)
    assert sorted(slot.spec.name for slot in layout.slots) == sorted(item.name for item in specs)
    for index, flat in enumerate(layout.flats):
        places = sorted((slot.offset, slot.stop) for slot in layout.slots if slot.flat == index)
        assert all(start * flat.itemsize % ALIGNMENT == 0 for start, _ in places)
        assert all(stop <= after for (_, stop), (after, _) in itertools.pairwise(places))
        assert all(stop <= flat.numel for _, stop in places)


@given(layouts())
def test_a_flat_buffer_holds_one_dtype_all_trainable_or_all_frozen_all_cast_or_none(
    drawn: tuple[Layout, Strategy, int],
) -> None:
    layout, strategy, _ = drawn
    kinds = []
    for index, flat in enumerate(layout.flats):
        specs = [slot.spec for slot in layout.slots if slot.flat == index]
        ((dtype, trainable, casts),) = {(s.dtype, s.trainable, s.casts or not strategy.low) for s in specs}
        assert flat.trainable is trainable
        lowered = strategy.low and casts and dtype in ("float32", "bfloat16")
        assert flat.dtype == (strategy.precision if lowered else dtype)
        assert flat.master == ("float32" if lowered and trainable else flat.dtype)
        assert flat.gradient == ("float32" if lowered and strategy.reduce_in_float32 else flat.dtype)
        for name, itemsize in (
            (flat.dtype, flat.itemsize),
            (flat.master, flat.master_itemsize),
            (flat.gradient, flat.gradient_itemsize),
        ):
            assert itemsize == {"float64": 8, "float32": 4, "bfloat16": 2}[name]
        kinds.append((dtype, trainable, casts))
    assert len(kinds) == len(set(kinds))


@given(layouts())
def test_buckets_hold_every_element_that_is_reduced_or_sharded_exactly_once(drawn) -> None:
    layout, strategy, _ = drawn
    held = [index for bucket in layout.buckets for index in bucket.slots]
    assert len(held) == len(set(held))
    for index in set(range(len(layout.slots))) - set(held):
        own = layout.slots[index].spec
        assert own.numel == 0 or (not own.trainable and not strategy.gathers)
    for bucket in layout.buckets:
        flat = layout.flats[bucket.flat]
        assert (bucket.itemsize, bucket.gradient_itemsize) == (flat.itemsize, flat.gradient_itemsize)
        assert bucket.trainable is flat.trainable
        assert bucket.units == tuple(sorted({layout.slots[i].spec.unit for i in bucket.slots}, key=UNITS.index))
        for index in bucket.slots:
            slot = layout.slots[index]
            assert slot.flat == bucket.flat
            assert bucket.start <= slot.offset <= slot.stop <= bucket.stop


@given(layouts())
def test_bucketed_flat_buffers_are_their_buckets_end_to_end(drawn) -> None:
    layout, strategy, _ = drawn
    for index, flat in enumerate(layout.flats):
        if flat.trainable or strategy.gathers:
            ranges = sorted((b.start, b.stop) for b in layout.buckets if b.flat == index)
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][: len(ranges)]
            assert (ranges[-1][1] if ranges else 0) == flat.numel


@given(layouts(), st.data())
def test_shards_are_equal_aligned_and_share_each_parameter_out_exactly_once(drawn, data) -> None:
    layout, _, world_size = drawn
    shards = data.draw(st.sampled_from([s for s in range(1, world_size + 1) if world_size % s == 0]))
    for bucket in layout.buckets:
        ranges = [bucket.shard(index, shards) for index in range(shards)]
        assert ranges[0][0] == bucket.start and ranges[-1][1] == bucket.stop
        assert all(stop == after for (_, stop), (after, _) in itertools.pairwise(ranges))
        assert len({stop - start for start, stop in ranges}) == 1
        for itemsize in (bucket.itemsize, bucket.gradient_itemsize):
            assert all(start * itemsize % ALIGNMENT == 0 for start, _ in ranges)
        for index in bucket.slots:
            slot = layout.slots[index]
            own = [layout.shard_of(bucket, index, rank, shards) for rank in range(shards)]
            assert all(first <= start <= stop <= last for (start, stop), (first, last) in zip(own, ranges, strict=True))
            elements = [element for start, stop in own for element in range(start, stop)]
            assert elements == list(range(slot.offset, slot.stop))


@given(layouts())
def test_buckets_come_in_the_order_in_which_backward_completes_them_kept_last(drawn) -> None:
    layout, _, _ = drawn
    order = [(bucket.kept, -UNITS.index(bucket.units[0])) for bucket in layout.buckets]
    assert order == sorted(order)
    assert len({bucket.name for bucket in layout.buckets}) == len(layout.buckets)


@given(layouts(zero=2))
def test_from_stage_2_on_a_bucket_holds_whole_units_of_one_kind(drawn) -> None:
    layout, _, _ = drawn
    for index, _ in enumerate(layout.flats):
        units = [unit for bucket in layout.buckets if bucket.flat == index for unit in bucket.units]
        assert len(units) == len(set(units))


@given(layouts(zero=3, share_parameters=False))
def test_sharded_parameters_are_gathered_unit_by_unit_but_for_the_kept(drawn) -> None:
    layout, _, _ = drawn
    for bucket in layout.buckets:
        assert bucket.kept or len(bucket.units) == 1
        assert bucket.kept == (bucket.name.startswith("(kept)"))
        assert ROOT not in bucket.units or bucket.kept
    kept = {unit for bucket in layout.buckets if bucket.kept for unit in bucket.units}
    assert not any(unit in kept for bucket in layout.buckets if not bucket.kept for unit in bucket.units)
    sizes = {
        unit: sum(layout.slots[i].spec.numel * layout.slots[i].spec.itemsize for i in layout.slots_of(unit))
        for unit in UNITS
    }
    assert sum(sizes[unit] for unit in kept - {ROOT}) <= max(sizes.values()) // 8


@given(layouts())
def test_padding_is_what_no_parameter_fills(drawn) -> None:
    layout, _, world_size = drawn
    trainable = [slot for slot in layout.slots if slot.spec.trainable]
    size = sum(flat.numel * flat.itemsize for flat in layout.flats if flat.trainable)
    assert layout.padding_bytes == size - sum(s.spec.numel * layout.flats[s.flat].itemsize for s in trainable)
    # At most a cache line for each parameter, and one for each rank in each bucket.
    assert layout.padding_bytes <= ALIGNMENT * (len(trainable) + world_size * len(layout.buckets))


def test_buckets_fill_from_the_last_layer_up_to_their_size() -> None:
    specs = [spec(f"p{i}", 2**18, f"u{i}") for i in range(5)]  # 1 MiB each
    layout = build_layout(specs, [f"u{i}" for i in range(5)], Strategy(bucket_mb=2), 2)
    assert [bucket.units for bucket in layout.buckets] == [("u3", "u4"), ("u1", "u2"), ("u0",)]
    assert [bucket.bytes for bucket in layout.buckets] == [2**21, 2**21, 2**20]


def test_the_size_of_a_bucket_is_that_of_its_gradients() -> None:
    specs = [spec(f"p{i}", 2**18, f"u{i}") for i in range(4)]
    units = [f"u{i}" for i in range(4)]
    wide = build_layout(specs, units, Strategy(bucket_mb=2, precision="bfloat16"), 2)
    narrow = build_layout(specs, units, Strategy(bucket_mb=2, precision="bfloat16", reduce_in_float32=False), 2)
    assert [len(bucket.units) for bucket in wide.buckets] == [2, 2]
    assert [len(bucket.units) for bucket in narrow.buckets] == [4]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    specs = [spec("small", 16, "u0"), spec("large", 2**19, "u1"), spec("last", 16, "u2")]
    layout = build_layout(specs, ["u0", "u1", "u2"], Strategy(bucket_mb=1), 1)
    assert [bucket.units for bucket in layout.buckets] == [("u2",), ("u1",), ("u0",)]


def test_stage_1_cuts_a_unit_where_stage_2_does_not() -> None:
    specs = [spec(f"p{i}", 2**18, "u0") for i in range(4)]
    assert len(build_layout(specs, ["u0"], Strategy(zero=1, bucket_mb=2), 2).buckets) == 2
    assert len(build_layout(specs, ["u0"], Strategy(zero=2, bucket_mb=2), 2).buckets) == 1


def test_small_units_and_shared_parameters_stay_gathered_together() -> None:
    units = [ROOT, "embed", "block.0", "block.1", "norm"]
    specs = [spec("tied", 800, ROOT), *(spec(unit, 8000, unit) for unit in units[1:4]), spec("norm", 1000, "norm")]
    layout = build_layout(specs, units, Strategy(zero=3), 4)
    assert [(bucket.name, bucket.units) for bucket in layout.buckets] == [
        *((unit, (unit,)) for unit in ("block.1", "block.0", "embed")),
        ("(kept)", (ROOT, "norm")),
    ]
    larger = [replace(item, shape=(1001,)) if item.name == "norm" else item for item in specs]
    assert build_layout(larger, units, Strategy(zero=3), 4).buckets[0].name == "norm", "above an eighth of the largest"


def test_frozen_parameters_are_in_buckets_only_where_they_are_sharded() -> None:
    specs = [spec("base", 640, "u0", trainable=False), spec("adapter", 64, "u0")]
    for zero in (0, 1, 2):
        (bucket,) = build_layout(specs, ["u0"], Strategy(zero=zero), 2).buckets
        assert bucket.trainable
    named = {b.name: b.trainable for b in build_layout(specs, ["u0"], Strategy(zero=3), 2).buckets}
    assert named == {"u0 float32": True, "u0 float32 frozen": False}


def test_default_bucket_is_25_mib() -> None:
    assert Strategy().bucket_bytes == 25 * 2**20


def test_padding_of_one_odd_parameter_is_a_line_for_each_rank() -> None:
    layout = build_layout([spec("odd", 3, "u0")], ["u0"], Strategy(), 4)
    assert layout.padding_bytes == 4 * ALIGNMENT - 12


def test_a_parameter_of_an_unknown_unit_or_a_repeated_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="unit 'nowhere'"):
        build_layout([spec("p", 1, "nowhere")], ["u0"], Strategy(), 1)
    with pytest.raises(ValueError, match="twice"):
        build_layout([spec("p", 1, "u0"), spec("p", 1, "u0")], ["u0"], Strategy(), 1)
