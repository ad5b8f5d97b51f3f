from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.layout import ALIGNMENT, ParameterSpec, build_layout
from paceline.strategy import Strategy

UNITS = ("(root)", "embed", "blocks.0", "blocks.1", "head")
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2}


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpec]:
    specs = []
    for index in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        specs.append(
            ParameterSpec(
                f"p{index}", shape, stride, dtype, ITEMSIZES[dtype], draw(st.sampled_from(UNITS)), draw(st.booleans())
            )
        )
    return specs


strategies = st.builds(
    Strategy,
    packing=st.sampled_from(["bucket", "parameter", "flat"]),
    bucket_mb=st.sampled_from([1e-5, 2e-4, 1.0]),
)


@given(models(), strategies, st.integers(1, 7))
def test_every_parameter_has_one_aligned_place_and_every_trainable_one_a_bucket(specs, strategy, world_size) -> None:
    layout = build_layout(specs, UNITS, strategy, world_size)
    assert sorted(slot.spec.name for slot in layout.slots) == sorted(spec.name for spec in specs)
    for flat_index, flat in enumerate(layout.flats):
        places = sorted((s.offset, s.stop) for s in layout.slots if s.flat == flat_index)
        assert all(start * flat.itemsize % ALIGNMENT == 0 for start, _ in places)
        assert all(stop <= after for (_, stop), (after, _) in itertools.pairwise(places))
        assert all(stop <= flat.numel for _, stop in places)
        assert {(s.spec.dtype, s.spec.trainable) for s in layout.slots if s.flat == flat_index} == {
            (flat.dtype, flat.trainable)
        }
    held = [index for bucket in layout.buckets for index in bucket.slots]
    assert len(held) == len(set(held))
    missing = set(range(len(layout.slots))) - set(held)
    assert all(not layout.slots[i].spec.trainable or layout.slots[i].spec.numel == 0 for i in missing)
    for bucket in layout.buckets:
        for index in bucket.slots:
            slot = layout.slots[index]
            assert slot.flat == bucket.flat
            assert bucket.start <= slot.offset <= slot.stop <= bucket.stop
        assert bucket.bytes % (world_size * ALIGNMENT) == 0, "shards are equal and aligned"


@given(models(), strategies, st.integers(1, 7))
def test_trainable_flat_buffers_are_their_buckets_end_to_end(specs, strategy, world_size) -> None:
    layout = build_layout(specs, UNITS, strategy, world_size)
    for index, flat in enumerate(layout.flats):
        if flat.trainable:
            ranges = sorted((b.start, b.stop) for b in layout.buckets if b.flat == index)
            assert [r[0] for r in ranges] == [0, *(r[1] for r in ranges[:-1])][: len(ranges)]
            assert (ranges[-1][1] if ranges else 0) == flat.numel


@given(models(), st.integers(1, 4))
def test_buckets_come_in_the_order_backward_completes_them(specs, world_size) -> None:
    layout = build_layout(specs, UNITS, Strategy(bucket_mb=1e-5), world_size)
    earliest = [UNITS.index(bucket.units[0]) for bucket in layout.buckets]
    assert earliest == sorted(earliest, reverse=True)


def spec(name: str, numel: int, unit: str) -> ParameterSpec:
    return ParameterSpec(name, (numel,), (1,), "float32", 4, unit)


def test_buckets_fill_from_the_last_layer_up_to_their_size() -> None:
    specs = [spec(f"p{i}", 2**18, f"u{i}") for i in range(5)]  # 1 MiB each
    layout = build_layout(specs, [f"u{i}" for i in range(5)], Strategy(bucket_mb=2), 2)
    assert [bucket.units for bucket in layout.buckets] == [("u3", "u4"), ("u1", "u2"), ("u0",)]
    assert [bucket.bytes for bucket in layout.buckets] == [2**21, 2**21, 2**20]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    specs = [spec("small", 16, "u0"), spec("large", 2**19, "u1"), spec("last", 16, "u2")]
    layout = build_layout(specs, ["u0", "u1", "u2"], Strategy(bucket_mb=1), 1)
    assert [bucket.units for bucket in layout.buckets] == [("u2",), ("u1",), ("u0",)]


def test_default_bucket_is_25_mib() -> None:
    assert Strategy().bucket_bytes == 25 * 2**20


def test_padding_is_counted() -> None:
    layout = build_layout([spec("odd", 3, "u0")], ["u0"], Strategy(), 4)
    assert layout.padding_bytes == 4 * ALIGNMENT - 12


def test_a_parameter_of_an_unknown_unit_or_a_repeated_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="unit 'nowhere'"):
        build_layout([spec("p", 1, "nowhere")], ["u0"], Strategy(), 1)
    with pytest.raises(ValueError, match="twice"):
        build_layout([spec("p", 1, "u0"), spec("p", 1, "u0")], ["u0"], Strategy(), 1)
