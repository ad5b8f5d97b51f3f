"""The ops of the steps in a block of a user's own loop, recorded on every rank: `with pl.record(model) as events:`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

from torch import Tensor, nn

from paceline.core.errors import EngineError
from paceline.core.events import Event, without_cut_step
from paceline.core.layout import ParameterSpec
from paceline.core.schedule import Schedule
from paceline.engine.api import engine_of
from paceline.executor.gradient_norms import GradientNorms


class Recorded(Sequence[Event]):
    """This rank's events of the steps in a `with pl.record(model)` block, in order; none until it has ended.

    Attributes:
        name: What the model's class is called.
        schedule: Of a step; None until the block has ended.
        specs: The model's parameters, in registration order.
        norms: Of the latest step's gradients, where they were asked for and ranks reduce gradients.
        local_gradients: Copies of them, by slot of the layout, before they were reduced; None for large models.
    """

    def __init__(self, name: str) -> None:
        """There are none yet, of a model of this name."""
        self.name = name
        self.schedule: Schedule | None = None
        self.specs: tuple[ParameterSpec, ...] = ()
        self.norms: GradientNorms | None = None
        self.local_gradients: dict[int, Tensor] | None = None
        self._events: tuple[Event, ...] = ()

    def end(self, events: Sequence[Event], schedule: Schedule, specs: Sequence[ParameterSpec]) -> None:
        """The block has ended, with these events."""
        self._events, self.schedule, self.specs = tuple(events), schedule, tuple(specs)

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self._events[index]

    def __repr__(self) -> str:
        steps = len({event.step for event in self._events})
        return f"<{len(self)} events of {steps} step{'s' * (steps != 1)} of {self.name}>"


@contextmanager
def record(model: nn.Module, norms: bool = False) -> Iterator[Recorded]:
    """Inside `with pl.record(model) as events:` every op of the steps is recorded, on this rank.

    After the block `events` lists them, each a `pl.Event`, and `pl.report(events)` makes a page of them if every rank
    recorded. Not a collective call. An exception ends the recording, too, without the step that it cut off. Of a long
    recording the last 131,072 ops of a rank are kept, in whole steps. On a GPU it reads when each op ran, which takes
    some microseconds of the host for each: a few steps tell enough.

    Args:
        model: A parallel one.
        norms: Whether norms of gradients are taken, too, before and after they are reduced, which the page then shows
            of the last step: by parameter and rank, and of up to 16 ranks with 67 million gradients together for each
            chunk while it goes from rank to rank. That takes two passes over each step's gradients, and a copy.

    Raises:
        ValueError: `parallelize` was not called on this model.
        EngineError: The model is recorded already, or a step is under way.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with pl.record(model) as events:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(8, 4).to(pl.init().device)).square().mean().backward()
        ...         optimizer.step()
        >>> events
        <9 events of 3 steps of Linear>
        >>> [event.kind for event in events if event.step == 2]
        ['forward', 'backward', 'update']
    """
    engine = engine_of(model)
    program = engine.program
    if engine.state.is_in_step(any(p.grad is not None for p in program.parameters.all)):
        raise EngineError(
            "pl.record inside a step: what came before in it would be missing. Begin it before forward, or after "
            "optimizer.step(); gradients of no more use are dropped by optimizer.zero_grad()"
        )
    was_on = program.recorder.begin()
    engine.record_gradient_norms(norms)
    recorded = Recorded(type(model).__name__)
    raised = True
    try:
        yield recorded
        raised = False
    finally:
        events = program.recorder.end(was_on)
        if norms and not raised:
            recorded.norms, recorded.local_gradients = engine.gradient_norms(), program.norms.take()
        engine.record_gradient_norms(False)
        recorded.end(without_cut_step(events) if raised else events, program.schedule, program.specs)
