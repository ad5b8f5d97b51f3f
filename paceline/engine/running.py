"""What the forward and the backward pass of one model share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from paceline.comm.plan import Traffic
from paceline.comm.world import World, open_clock
from paceline.engine.agreement import check_same_model
from paceline.engine.arrangement import Arrangement
from paceline.engine.counts import Counts
from paceline.engine.executor import Executor
from paceline.engine.gradients import Gradients
from paceline.engine.progress import EngineError, Progress
from paceline.engine.synchronizer import Synchronizer
from paceline.engine.units import parameter_specs
from paceline.engine.weights import Weights, alone_on
from paceline.layout import Layout
from paceline.ops import Op
from paceline.schedule import Schedule
from paceline.strategy import Strategy


class Running:
    """One model laid out on one rank, with what executes its schedule.

    Attributes:
        strategy: How it is synchronised.
        world: The job.
        progress: Which step and micro-batch the training loop is in.
        counts: What ranks agree on.
        synchronizer: Performs collectives; None with one rank.
        gradients: In their buckets; None before the first backward, and where nothing has to be moved.
        executor: Launches and records ops.
    """

    def __init__(self, module: nn.Module, units: Iterable[str], strategy: Strategy, world: World) -> None:
        """Opens connections, sends rank 0's weights and buffers to all, and lays the model out. A collective call."""
        self.strategy, self.world = strategy, world
        self._module, self._units = module, tuple(units)
        self._specs = parameter_specs(module, self._units)
        self.synchronizer: Synchronizer | None = None
        if world.world_size > 1:
            check_same_model(self._specs, module, strategy)
            self.synchronizer = Synchronizer(strategy, world)
            self.synchronizer.broadcast([p.data for p in module.parameters()])
            self.synchronizer.broadcast(module.buffers())
        transport = self.synchronizer.transports["counts"] if self.synchronizer else None
        self.counts = Counts(len(self._specs), world.rank, world.device, transport)
        self.progress = Progress(world.world_size)
        self.gradients: Gradients | None = None
        self.arranged = self.arrange(self._units)
        self.start()

    # ---- layout

    @property
    def layout(self) -> Layout:
        """Where parameters and gradients sit."""
        return self.arranged.layout

    @property
    def schedule(self) -> Schedule:
        """The ops of a step, read to decide what is launched when."""
        return self.arranged.schedule

    @property
    def weights(self) -> Weights:
        """The parameters."""
        return self.arranged.weights

    def arrange(self, order: tuple[str, ...]) -> Arrangement:
        """Lays the model out for a forward order. A collective call."""
        # What is sent every step lies where a transport reaches it.
        alone = alone_on(self.world.device)
        transports = self.synchronizer.transports if self.synchronizer else {}
        carrier = transports.get("gather") or (transports["reduce"] if self.served else None)
        allocate = carrier.allocate if carrier else alone
        allocate_whole = carrier.allocate_shared if carrier and self.strategy.share_parameters else allocate
        return Arrangement(
            self._module,
            self._specs,
            self._units,
            order,
            self.strategy,
            self.world,
            self.counts.numel,
            allocate,
            allocate_whole,
        )

    def allocate_gradients(self) -> None:
        """Allocates buckets of gradients, as the schedule places them. A collective call."""
        if self.schedule.collects:
            transports = self.synchronizer.transports if self.synchronizer else {}
            alone = alone_on(self.world.device)
            allocate = transports["reduce"].allocate if transports else alone
            sums = transports["replicate"].allocate if "replicate" in transports else alone
            self.gradients = Gradients(self.schedule, self.weights, allocate, sums)

    # ---- execution

    def start(self) -> None:
        """Starts executing, with nothing under way."""
        streams = self.synchronizer.streams if self.synchronizer else {}
        self.executor = Executor(self.world.rank, open_clock(self.world), streams, self._work)

    def _work(self, op: Op) -> Callable[[], Traffic]:
        assert self.synchronizer is not None
        return self.synchronizer.work(op, self.weights, self.gradients, self.counts)

    def require_reduced(self, what: str) -> None:
        """Refuses to use gradients that are partial, this rank's own, or of a backward that the hooks did not see.

        Raises:
            EngineError: They are.
        """
        self.progress.require_reduced(what)
        if self.world.world_size == 1 or self.progress.reduced:
            return
        for index, (slot, parameter) in enumerate(zip(self.layout.slots, self.weights.parameters, strict=True)):
            reduced = self.gradients is not None and self.gradients.holds(index)
            if parameter.grad is not None and not reduced:
                raise EngineError(
                    f"{what}: {slot.spec.name} has a gradient of a backward that paceline did not see, so it is this "
                    "rank's own. Compute the loss from what model(...) returns; units that only run inside a reentrant "
                    "checkpoint around the whole model are not seen either"
                )

    @property
    def served(self) -> bool:
        """See `Strategy.serves`."""
        return self.strategy.serves(self.world.world_size)
