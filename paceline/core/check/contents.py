"""The contents of every rank's buffers, op by op: an interpreter of schedules that moves symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.core.check.facts import Facts
from paceline.core.check.gradients import Gradients
from paceline.core.check.parameters import Parameters
from paceline.core.check.report import Fault
from paceline.core.check.sequences import STEPS, Round
from paceline.core.check.spans import has_own_memory
from paceline.core.check.state import State
from paceline.core.ops import Op


def contents_faults(facts: Sequence[Facts], rounds: Iterable[Round], micro_batches: int) -> list[Fault]:
    """Runs two steps on symbols, up to the first op that does not find what it must, and says what that finds.

    Args:
        facts: Of each rank.
        rounds: The ops of all ranks, in an order in which they can run.
        micro_batches: Micro-batches of a step.
    """
    state = State(facts)
    gradients = Gradients(state, micro_batches)
    parameters = Parameters(state, gradients)
    compute: dict[str, Callable[[int, Op, int], None]] = {
        "forward": parameters.computes,
        "backward": parameters.computes,
        "unshard": parameters.unshard,
        "reshard": parameters.reshard,
        "copy_in": gradients.copy_in,
        "statistics": gradients.statistics,
        "widen": gradients.widen,
        "publish": gradients.publish,
        "update": parameters.update,
        "cast": parameters.cast,
    }
    collective: dict[str, Callable[[Mapping[int, Op], int], None]] = {
        "all_gather": parameters.all_gather,
        "broadcast": parameters.broadcast,
        "reduce_scatter": gradients.reduce,
        "all_reduce": gradients.reduce,
        "reduce": gradients.reduce,
        "barrier": lambda ops, step: None,
    }
    ran = 0
    for round_ in rounds:
        ran += len(round_.positions)
        ops = {rank: facts[rank].ops[position] for rank, position in round_.positions.items()}
        rank, op = next(iter(ops.items()))
        if has_own_memory(op):
            continue
        if op.stream == "compute":
            compute[op.kind](rank, op, round_.step)
        else:
            collective[op.kind](ops, round_.step)
        if state.faults:
            return state.faults
    # Where ranks could not go on, their sequences are at fault and not what the buffers hold.
    if ran == sum(STEPS * len(each.ops) for each in facts):
        parameters.require_updated()
    return state.faults
