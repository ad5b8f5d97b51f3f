"""Objects for as long as they live, which any thread may go through while others add to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """Objects in the order in which they were added, none kept alive.

    `weakref.WeakSet` goes on from one to the next in Python, and raises where another thread adds one in between.
    """

    def __init__(self) -> None:
        """None yet."""
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> None:
        """Adds an object, until it is discarded or nobody else uses it."""
        references, key = self._references, id(item)
        references[key] = weakref.ref(item, lambda _: references.pop(key, None))

    def discard(self, item: T) -> None:
        """Forgets an object, if it is there."""
        self._references.pop(id(item), None)

    def clear(self) -> None:
        """Forgets all."""
        self._references.clear()

    def __iter__(self) -> Iterator[T]:
        """Those that lived when this began and still do."""
        # In one step: no other thread comes between.
        for reference in list(self._references.values()):
            item = reference()
            if item is not None:
                yield item
