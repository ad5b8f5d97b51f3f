"""The calls that a training loop may make next: a small explicit state machine of one model. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from paceline.core.errors import EngineError

Forward = Literal["planned", "extra", "within"]
"""The kind of a forward with gradients: the first of a micro-batch of the step; one that no op of the step foresees,
such as one for logging between backward and step; or a further one of the same micro-batch."""


class StepState:
    """Counts steps and micro-batches from what the loop is seen to do, and refuses what would be wrong there.

    A step is over after an update, or when a backward follows a synchronised one. Between two calls a model is in one
    of these states, and each call below is defined or refused in each of them:

    | phase | gradients | allowed |
    |---|---|---|
    | idle | none, local, reduced | forward, backward; update unless local, where these differ between ranks |
    | forward | none, local, reduced | forward, backward; update as above (the forward's graph is then refused) |
    | backward | any | nothing but its own end, and reset |

    Attributes:
        step: Number of the current step, from 0.
        micro_batch: Number of the micro-batch under way within the step, or of the next one.
        last_micro_batch: Number of the latest one whose backward is complete.
        phase: What is under way.
        synchronises: Whether the backward under way, or the latest one, reduces gradients.
        gradients: What `p.grad` holds: none yet, this rank's share of a sum that later backwards add to (local), or
            the same reduced gradients as on the other ranks, or this rank's shard of them (reduced).
        generation: How many times the weights have changed, or may have: by an update, or by hand.
        is_used: Whether an update came after the latest backward.
        is_partly_loaded: Whether some weights are a checkpoint's and some are not; see `require_whole_weights`.
        is_over: Whether the model's engine has ended.
    """

    def __init__(self) -> None:
        """Starts before the first step."""
        self.step = self.micro_batch = self.last_micro_batch = self.generation = 0
        self.phase: Literal["idle", "forward", "backward"] = "idle"
        self.synchronises = True
        self.gradients: Literal["none", "local", "reduced"] = "none"
        self._updated = self.is_partly_loaded = self.is_used = self.is_over = False
        self._deferrals = self._resets = 0
        self._edited = -1

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Lets backward passes that begin inside keep their gradients on this rank."""
        resets = self._resets
        self._deferrals += 1
        try:
            yield
        finally:
            # One that was left open across a reset is over already.
            if resets == self._resets:
                self._deferrals -= 1

    def begin_forward(self) -> Forward:
        """A forward with gradients begins.

        Raises:
            EngineError: The last backward did not finish.
        """
        self.require_whole_backward("forward")
        if self.phase == "forward":
            return "within"
        if self._updated:
            self._begin_step()
        self.phase = "forward"
        # After a synchronised backward no further micro-batch of this step is planned.
        return "extra" if self._is_synchronised else "planned"

    def begin_backward(self) -> None:
        """A backward begins that leaves gradients in parameters.

        Raises:
            EngineError: The last backward did not finish.
        """
        self.require_whole_backward("backward")
        if self._updated or self._is_synchronised:
            self._begin_step()
        self.phase = "backward"
        self.synchronises = self._deferrals == 0

    def end_backward(self) -> None:
        """The backward is complete, its gradients reduced if they were to be."""
        self.last_micro_batch = self.micro_batch
        self.micro_batch += 1
        self.phase = "idle"
        self.gradients = "reduced" if self.synchronises else "local"
        self.is_used = False

    def end_update(self) -> None:
        """An optimizer has changed the weights."""
        self.generation += 1
        self._updated = self.is_used = True
        self.phase = "idle"

    def end_edit(self) -> None:
        """Whole parameters may have been edited, and graphs from before cannot be told whether they were."""
        self.generation += 1
        self._edited = self.generation

    def reset(self) -> None:
        """The step under way is given up; its gradients are dropped."""
        self.phase, self.micro_batch, self._deferrals = "idle", 0, 0
        self.gradients, self._updated = "none", False
        self._resets += 1

    def begin_replacing(self) -> None:
        """From now on the weights are partly others, until `replace_weights`."""
        self.is_partly_loaded = True

    def replace_weights(self) -> None:
        """The weights have become others than any step's, and all gradients are dropped."""
        self.is_partly_loaded = False
        self.end_update()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """The loop has dropped all gradients, of any kind."""
        self.gradients = "none"

    # ---- what is refused

    def require_whole_weights(self, what: str) -> None:
        """Refuses to use weights of which some are a checkpoint's and some are not.

        Raises:
            EngineError: They are.
        """
        if self.is_partly_loaded:
            raise EngineError(
                f"{what} after a pl.load that failed half way: some weights are the checkpoint's, others are as they "
                "were. Load another checkpoint, or build the model and its optimizer again"
            )

    def end(self) -> None:
        """The model's engine has ended: no backward of its forwards may follow."""
        self.is_over = True

    def require_current(self, generation: int) -> None:
        """Refuses a backward through weights that have since changed.

        Raises:
            EngineError: The forward used another generation of the weights, or the engine has ended since.
        """
        if self.is_over:
            raise EngineError(
                "pl.release ended this model's engine between this forward and its backward, which can no longer "
                "reduce gradients: release it before the forward or after the step, or run the forward again"
            )
        if generation < self._edited:
            raise EngineError(
                "pl.full_parameters was entered, or a state loaded, between this forward and its backward. Sharded "
                "parameters may have changed there, so the gradients could belong to weights that no longer exist: "
                "do it before the forward or after the backward, or read model.state_dict() or copy.deepcopy(model)"
            )
        if generation != self.generation:
            raise EngineError(
                "the optimizer stepped between this forward and its backward, so the gradients would belong to "
                "weights that no longer exist: call backward before optimizer.step(), or run the forward again. "
                "Networks with an optimizer each (a GAN's) are parallelized one by one"
            )

    def require_reduced(self, what: str) -> None:
        """Refuses to use gradients that are partial or this rank's own.

        Raises:
            EngineError: They are.
        """
        self.require_whole_backward(what)
        if self.gradients == "local":
            raise EngineError(
                f"{what} after a backward under no_sync: the gradients are this rank's own and replicas would drift "
                "apart. Run the step's last micro-batch outside no_sync (pl.accumulate does), or call pl.reset(model)"
            )

    def require_whole_backward(self, what: str) -> None:
        """Refuses to go on after a backward that did not finish.

        Raises:
            EngineError: It did not.
        """
        if self.phase == "backward":
            raise EngineError(
                f"{what} after a backward that did not finish: its gradients are partial. After an exception in "
                "backward call pl.reset(model) on every rank, then go on with the next batch"
            )

    def require_between_steps(self, what: str, holds: bool) -> None:
        """Refuses what would forget gradients that no update has used.

        Args:
            what: That.
            holds: Whether some parameter has a gradient.

        Raises:
            EngineError: There are some.
        """
        self.require_whole_backward(what)
        if self._awaits_update(holds):
            raise EngineError(
                f"{what} between backward and optimizer.step(): the gradients would be forgotten. Call it after "
                "optimizer.step(), or drop them by optimizer.zero_grad() first, as after a step that a scaler skipped"
            )

    def is_in_step(self, holds: bool) -> bool:
        """Whether a step has begun that no update has ended.

        Args:
            holds: Whether some parameter has a gradient.
        """
        return self.phase != "idle" or self._awaits_update(holds)

    def _awaits_update(self, holds: bool) -> bool:
        return holds and (self.gradients == "local" or (self.gradients == "reduced" and not self._updated))

    @property
    def _is_synchronised(self) -> bool:
        """Whether this step has had its synchronised backward."""
        return self.micro_batch > 0 and self.synchronises

    def _begin_step(self) -> None:
        self.step += 1
        self.micro_batch = 0
        self._updated = False
