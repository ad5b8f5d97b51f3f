"""Models, strategies and schedules drawn at random, for what must hold of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from paceline.core.build_layout import build_layout
from paceline.core.check import all_ranks
from paceline.core.layout import ROOT, Layout, ParameterSpec
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy

UNITS = (ROOT, "embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2}

micro_batch_counts = st.integers(1, 3)


def spec(
    name: str,
    shape: int | tuple[int, ...],
    unit: str,
    dtype: str = "float32",
    trainable: bool = True,
    order: Sequence[int] | None = None,
    casts: bool = True,
) -> ParameterSpec:
    """A parameter without gaps; a number stands for the shape of one dimension.

    `order` has the dimensions from the one that varies slowest in memory to the fastest; without it, it is contiguous.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    strides, step = [1] * len(shape), 1
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return ParameterSpec(name, shape, tuple(strides), dtype, ITEMSIZES[dtype], unit, trainable, casts)


@st.composite
def models(draw: st.DrawFn, units: tuple[str, ...] = UNITS) -> list[ParameterSpec]:
    """Up to 14 parameters of odd sizes in some of `units`, some frozen, of one dtype or several, some transposed.

    Of a tied parameter only its place is seen: it belongs to `ROOT`.
    """
    dtypes = draw(st.sampled_from([["float32"], ["bfloat16"], ["float32", "bfloat16"], sorted(ITEMSIZES)]))
    frozen = draw(st.booleans())
    # Units of about one size are gathered one by one; small ones beside a large one stay gathered.
    if draw(st.booleans()):
        count, spread, shapes = draw(st.integers(7, 14)), True, st.sampled_from([(61,), (64,), (7, 9), (0,)])
    else:
        count, spread = draw(st.integers(0, 14)), False
        shapes = st.one_of(
            st.sampled_from([(), (0,), (1,), (7,), (3, 0), (5, 3), (64,), (1001,)]),
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
        )
    ordered = [(shape, draw(st.permutations(range(len(shape))))) for shape in (draw(shapes) for _ in range(count))]
    return [
        spec(
            f"p{index}",
            shape,
            units[index % len(units)] if spread else draw(st.sampled_from(units)),
            draw(st.sampled_from(dtypes)),
            not (frozen and draw(st.booleans())),
            order,
            draw(st.integers(0, 4)) > 0,
        )
        for index, (shape, order) in enumerate(ordered)
    ]


@st.composite
def strategies(draw: st.DrawFn, world_size: int = 1, **fixed: Any) -> Strategy:
    """Any strategy that suits the number of ranks; `fixed` are settings to leave as they are."""
    zero = fixed.get("zero", draw(st.sampled_from([0, 1, 2, 3])))
    chosen: dict[str, Any] = {
        "zero": zero,
        "bucket_mb": draw(st.sampled_from([1e-5, 2e-4, 1e-3, 25.0])),
        "precision": draw(st.sampled_from(["float32", "bfloat16"])),
    }
    chosen |= fixed
    chosen.setdefault("reduce_in_float32", chosen["precision"] == "float32" or draw(st.booleans()))
    if zero:
        chosen["shard"] = draw(st.sampled_from([0, *(s for s in range(1, world_size + 1) if world_size % s == 0)]))
    accumulations = ["auto", "each"]
    if chosen["reduce_in_float32"]:
        accumulations.append("defer")
    if zero:
        chosen["share_parameters"] = fixed.get("share_parameters", draw(st.booleans()))
    if zero == 3 and not chosen["share_parameters"]:
        accumulations.append("hold")
    chosen["accumulation"] = draw(st.sampled_from(accumulations))
    if "hold" in accumulations and chosen["accumulation"] != "hold":
        chosen["prefetch"] = draw(st.sampled_from([0, 1, 2, 7]))
    if zero < 2:
        chosen["packing"] = draw(st.sampled_from(["bucket", "parameter", "flat"]))
        chosen["synchronize"] = draw(st.sampled_from(["overlap", "after"]))
    if zero == 0 and chosen["precision"] == "float32" and chosen["accumulation"] in ("auto", "defer"):
        chosen["collective"] = draw(st.sampled_from(["parameter_server", "all_reduce"]))
    return Strategy(**(chosen | fixed))


world_sizes = st.sampled_from([1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8])


@st.composite
def layouts(draw: st.DrawFn, sizes: st.SearchStrategy[int] = world_sizes, **fixed: Any) -> tuple[Layout, Strategy, int]:
    """A layout, and the strategy and number of ranks that it was made for."""
    world_size = draw(sizes)
    strategy = draw(strategies(world_size, **fixed))
    return build_layout(draw(models()), UNITS, strategy, world_size), strategy, world_size


@st.composite
def jobs(draw: st.DrawFn, sizes: st.SearchStrategy[int] = world_sizes, **fixed: Any) -> list[Schedule]:
    """The schedules of all ranks: units run in an order of their own, some do not run, and some are deferred."""
    layout, strategy, world_size = draw(layouts(sizes, **fixed))
    order = draw(st.one_of(st.just(UNITS[1:]), st.permutations(UNITS)))
    order = tuple(order[: draw(st.sampled_from([len(order)] * 4 + [len(order) - 1, 1, 0]))])
    deferred = draw(st.sampled_from([frozenset(), frozenset(order[:1]), frozenset(order[2:4])]))
    return all_ranks(layout, strategy, world_size, order, deferred, statistics=9)


@st.composite
def schedules(draw: st.DrawFn, **fixed: Any) -> Schedule:
    """A schedule of some rank of a job; see `jobs`."""
    ranks = draw(jobs(**fixed))
    return ranks[draw(st.integers(0, len(ranks) - 1))]
