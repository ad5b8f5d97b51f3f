"""Micro-batches of an optimizer step, of which the last one's backward completes the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

from torch import nn

from paceline.comm.control import all_gather_json
from paceline.engine.api import engine_of

T = TypeVar("T")


def accumulate(model: nn.Module, batches: Iterable[T], uneven: bool = False) -> Iterator[T]:
    """Yields micro-batches such that only the last one's backward completes the step's gradients.

    Scale each loss yourself, as in any accumulating loop.

    Args:
        model: A parallel model.
        batches: The micro-batches of one optimizer step, on this rank.
        uneven: Whether ranks may have different numbers of them, or none. They are then counted over ranks first, and
            a rank without one contributes zeros. If not, every rank has equally many.

    Yields:
        Each of `batches`, as it is. A rank that has fewer than others yields its own only.

    Raises:
        ValueError: `parallelize` was not called on this model.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2))
        >>> batch = torch.randn(8, 4).to(pl.init().device)
        >>> for rows in pl.accumulate(model, batch.chunk(4)):
        ...     loss = model(rows).square().mean() / 4
        ...     loss.backward()
    """
    engine = engine_of(model)
    if uneven:
        batches = list(batches)
        counts = all_gather_json(len(batches), "number of micro-batches")
        try:
            for index in range(max(counts)):
                engine.forward.idle_ranks.there_are(index >= min(counts))
                with engine.no_sync() if index < max(counts) - 1 else nullcontext():
                    if index < len(batches):
                        yield batches[index]
                    else:
                        engine.backward.idle()
        finally:
            engine.forward.idle_ranks.there_are(False)
        return
    iterator = iter(batches)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        with engine.no_sync():
            yield current
        current = following
    yield current
