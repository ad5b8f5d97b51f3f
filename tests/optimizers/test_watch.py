"""What is told of optimizers may be collected at any moment."""

from __future__ import annotations

import gc

from paceline.optimizers.watch import alive, watch_optimizers


class _Watcher:
    def __init__(self) -> None:
        self.itself = self  # so that only a collection frees it


def collected_meanwhile() -> set[int]:
    """How many watchers were found, beside those of other tests' models."""
    found, before = set(), gc.get_threshold()
    try:
        for number in range(36):
            # More than Python keeps memory of former tuples ready for, so that a tuple of them all may collect.
            for watcher in [_Watcher() for _ in range(25)]:
                watch_optimizers(watcher)  # type: ignore[arg-type]
            del watcher
            # After each number of allocations, so that each in turn is the one that collects.
            gc.set_threshold(gc.get_count()[0] + number % 12)
            found.add(sum(isinstance(each, _Watcher) for each in alive()))
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
        gc.collect()  # they would be told of the next test's optimizers
    return found


def test_watchers_are_collected_while_they_are_gone_through(ranks) -> None:
    (found,) = ranks(1, collected_meanwhile)
    assert 0 in found and max(found) > 0
