"""A row as `paceline plan` forecasts: by a trace of the model, and by the schedule that the engine executes."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.plan.case import Case
from paceline.plan.estimate import Estimate, Setting
from paceline.plan.hardware import Hardware
from paceline.plan.run import Run
from paceline.plan.step import StepTime
from paceline.plan.subject import Kernels, transformer


def estimate(run: Run, hardware: Hardware) -> Estimate:
    """The forecast of a run, had paceline run it.

    Raises:
        UserError: It shares the work or computes again as no strategy of paceline's does, or in another precision.
    """
    kernels: Kernels = "cpu" if hardware.is_cpu else "cuda"
    case = Case(transformer(_NAME, run.config, kernels=kernels), hardware, run.devices)
    return case.estimate(Setting(strategy(run), run.samples, run.micro_batches))


def step_time(run: Run, hardware: Hardware) -> StepTime:
    """The same, by where the seconds of the step go.

    Raises:
        UserError: See `estimate`.
    """
    found = estimate(run, hardware)
    gather = found.exposed.get("all_gather", 0.0)
    return StepTime(
        compute=found.compute,
        gather=gather,
        reduce=found.communication - gather,
        optimizer=found.optimizer,
        straggling=found.bubble,
    )


_NAME = "a row's model"


def strategy(run: Run) -> Strategy:
    """The strategy of paceline's that shares and computes as a run does.

    Raises:
        UserError: There is none.
    """
    if run.tensor * run.pipeline * run.context_ranks > 1:
        raise UserError("paceline's engine has no tensor, pipeline or context ranks")
    if run.recompute not in ("none", "unit"):
        raise UserError(f"recomputing {run.recompute} alone is no setting of paceline's")
    if run.dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"paceline does not compute in {run.dtype}")
    plain = Strategy(
        zero=run.zero,  # type: ignore[arg-type]
        shard=run.shard,
        precision=run.dtype,  # type: ignore[arg-type]
        reduce_in_float32=run.reduced == 4,
    )
    if run.recompute == "none" or not run.recompute_share:
        return plain
    return replace(plain, recompute="unit", recompute_every=round(1 / run.recompute_share))
