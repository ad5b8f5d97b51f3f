"""The end of a step's last backward: ranks agree on it, reduce what came late, and publish its gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from paceline.core.layout import Bucket
from paceline.core.ops import GRADIENTS, STATISTICS, Key
from paceline.core.step_state import StepState
from paceline.engine.gradients import Gradients
from paceline.engine.program import Program
from paceline.engine.unit_order import UnitOrder


class StepEnd:
    """Makes the gradients of one model's step complete, the same on every rank.

    Attributes:
        reduced_late: Whether some came after their unit was copied in, in the latest step.
    """

    def __init__(self, program: Program, state: StepState, order: UnitOrder) -> None:
        """No step has ended yet.

        Args:
            program: The model's.
            state: Tells which micro-batch ends.
            order: Is told where units are copied in later from now on.
        """
        self._program, self._state, self._order = program, state, order
        self.reduced_late = False

    def run(self, gradients: Gradients, late: Sequence[int], slow: Collection[int]) -> None:
        """Sends statistics, waits for the reductions and publishes the reduced gradients. A collective call.

        Args:
            gradients: The model's, all copied in.
            late: Indices of parameters of which more came after they were copied in.
            slow: Those whose gradient was not complete when their unit's backward was over.

        Raises:
            EngineError: Ranks saw the step differently.
        """
        program, executor, micro_batch = self._program, self._program.executor, self._state.micro_batch
        statistics, buffers, first = program.statistics, program.module_buffers, self._state.step == 0
        used: Collection[int] = gradients.used_in_step
        slow = sorted({*slow, *late})
        if program.collectives is not None:
            key = Key("statistics", STATISTICS, micro_batch, "backward")
            executor.begin(key)
            squares = gradients.square_sum() if program.schedule.shards > 1 else None
            checks = (micro_batch, executor.launched.take())
            statistics.fill(used, slow, squares, gradients.carries, checks, buffers.unknown())
            executor.end()
            executor.done(key)
        key = Key("publish", GRADIENTS, micro_batch, "backward")
        executor.begin(key)
        if program.collectives is not None:
            statistics.require_alike()
            self._reduce_late(gradients, late, statistics.late(slow, first))
            if statistics.changes_buffers(first):
                buffers.agree()
            buffers.step_over()
            used = used if gradients.complete else statistics.used()
        gradients.publish(used, keep=program.world.rank == 0 or not program.schedule.has_server)
        executor.end()
        executor.done(key)

    def _reduce_late(self, gradients: Gradients, mine: Sequence[int], anyones: Sequence[int]) -> None:
        """Reduces what came after its unit was copied in; from now on these units wait for the whole backward."""
        program = self._program
        self.reduced_late = bool(anyones)
        if not anyones:
            return
        for bucket in program.schedule.reduced_buckets:
            if not set(anyones).isdisjoint(bucket.slots):
                self._reduce_again(gradients, bucket, mine)
        program.defer(program.parameters.flat.units_of(anyones))
        self._order.slots_changed = program.schedule.reuses_gradient_slots

    def _reduce_again(self, gradients: Gradients, bucket: Bucket, late: Collection[int]) -> None:
        """Reduces gradients that came after their bucket was, and adds them to it. A collective call."""
        program, collectives = self._program, self._program.collectives
        assert collectives is not None
        whole = gradients.flat.whole(bucket)
        spare = collectives.transports["reduce"].allocate(bucket.numel, whole.dtype)
        gradients.write_late(bucket, late, spare)
        own = gradients.flat.own(bucket, spare)
        first, *between = program.schedule.reduce_late(bucket, self._state.micro_batch)
        contents = program.parameters.flat.contents[bucket.name]
        program.executor.run([first], collectives.carry_out(first, spare, contents, scale=program.schedule.scale))
        for op in between:
            program.executor.run([op], collectives.carry_out(op, own, contents))
        with torch.no_grad():
            gradients.flat.reduced(bucket).add_(own)
