"""Norms of what ranks' gradients add up to, chunk by chunk, from the products that a run wrote down."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec

from paceline.core.schedule import Schedule
from paceline.report.gradient_norms import Norms, read_norms
from paceline.report.lines import Damage, read_lines


class Products(msgspec.Struct, frozen=True):
    """Products of a bucket's gradients in a step: a line of chunk_products.jsonl.

    Attributes:
        step: Its number, from 1.
        bucket: Its name.
        parts: How many of the step's micro-batches were reduced; products are of the last.
        products: By chunk, of each two ranks: rank 0 with all, rank 1 with those from 1 on, and so forth. None is not
            finite.
    """

    step: int
    bucket: str
    parts: int
    products: list[list[float | None]]


@dataclass(frozen=True)
class ChunkNorms:
    """What they tell of a step.

    Attributes:
        lines: Of each bucket.
        world: Number of ranks.
        is_mean: Whether what is added up of all ranks is then divided by their number.
    """

    lines: tuple[Products, ...]
    world: int
    is_mean: bool

    @property
    def step(self) -> int:
        """Its number, from 1."""
        return self.lines[0].step

    @property
    def parts(self) -> int:
        """How many of its micro-batches were reduced."""
        return self.lines[0].parts

    @cached_property
    def _of(self) -> dict[str, Products]:
        return {line.bucket: line for line in self.lines}

    @cached_property
    def _position(self) -> dict[tuple[int, int], int]:
        pairs = [(a, b) for a in range(self.world) for b in range(a, self.world)]
        return {pair: position for position, pair in enumerate(pairs)}

    def norm(self, bucket: str, chunk: int, ranks: Collection[int]) -> float | None:
        """The 2-norm of these ranks' gradients added up in a chunk, as a collective leaves it; None: not finite."""
        values = self._of[bucket].products[chunk]
        squared, own = 0.0, 0.0
        for a in ranks:
            for b in ranks:
                if a <= b:
                    product = values[self._position[a, b]]
                    if product is None:
                        return None
                    squared += product * (1 if a == b else 2)
                    own += product if a == b else 0.0
        # What cancels out is known to as many places as the products are written with.
        norm = math.sqrt(squared) if squared > 1e-11 * own else 0.0
        return norm / self.world if self.is_mean and len(ranks) == self.world else norm


def read_products(path: Path, damage: Damage) -> tuple[Products, ...]:
    """The products of the latest step that has some.

    Args:
        path: The file; none is an empty one.
        damage: Counts lines that are none.
    """
    latest: dict[str, Products] = {}
    for line in read_lines(path, msgspec.json.Decoder(Products), damage):
        products = line.value
        if not products.products or products.parts < 1:
            damage.lines += 1
            continue
        # A step that a run that went back did again is written again.
        if latest and (products.bucket in latest or any(each.step != products.step for each in latest.values())):
            latest = {}
        latest[products.bucket] = products
    return tuple(latest.values())


def read_gradients(path: Path, problems: list[str]) -> tuple[tuple[Norms, ...], tuple[Products, ...]]:
    """What a run wrote of the gradients of the latest step that has some: norms by parameter, products by chunk.

    Args:
        path: The run's folder.
        problems: Sentences that say what is damaged are added to them.
    """
    from paceline.train.run_folder import CHUNK_PRODUCTS, GRADIENT_NORMS

    damage = Damage()
    norms = read_norms(path / GRADIENT_NORMS, damage)
    problems += damage.describe(GRADIENT_NORMS)
    damage = Damage()
    products = read_products(path / CHUNK_PRODUCTS, damage)
    problems += damage.describe(CHUNK_PRODUCTS)
    return norms, products if norms and products and products[0].step == norms[0].step else ()


def chunk_norms(lines: Sequence[Products], schedule: Schedule) -> ChunkNorms | None:
    """What products tell of a run's steps; None where they are not of all buckets, chunks and ranks of its schedule."""
    world = schedule.world_size
    chunks = schedule.shards if schedule.shards > 1 else world
    pairs = world * (world + 1) // 2
    whole = {line.bucket for line in lines} == {bucket.name for bucket in schedule.reduced_buckets}
    shaped = all(len(line.products) == chunks and {len(each) for each in line.products} == {pairs} for line in lines)
    alike = all(a.parts == b.parts for a, b in pairwise(lines))
    if not (lines and whole and shaped and alike):
        return None
    return ChunkNorms(tuple(lines), world, schedule.strategy.gradients == "mean")
