"""Predicts the step of a described row, with the costs of every other forecast."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.core.errors import UserError
from paceline.plan import profiles
from paceline.plan.fitted import FITTED, LAUNCH, Constants, kernels
from paceline.plan.hardware import Hardware, Link
from paceline.plan.published import traced
from paceline.plan.published.describe import Described, describe
from paceline.plan.published.measured import contradicting, measured_seconds, read_as_share
from paceline.plan.published.stacks import OWN, STACKS, software
from paceline.plan.published.table import Row
from paceline.plan.step import StepTime, step_time

_DEVICES = re.compile(r"(?<![a-wyz0-9])(?:rtx-?)?(gb200|gh200|b200|h200|h100|a100|v100|mi300x|l40s|4090)(?!\d|x(?!\d))")
_VARIANTS = re.compile(r"nvl(?![0-9a-z])|pci-?e|\.json")
_MEMORY = re.compile(r"(\d+) ?-?gi?b(?![a-z])")


_SAID = {"precision", "bf16", "fp16", "fp8", "mode"}
"""Columns that say what was computed in."""


@dataclass(frozen=True)
class Prediction:
    """A row's step as measured and as predicted.

    Attributes:
        described: What was run.
        measured: Seconds.
        column: What they were told by.
        step: The forecast, by where its seconds go.
    """

    described: Described
    measured: float
    column: str
    step: StepTime

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.step.total / self.measured - 1


def predict(row: Row, constants: Constants = FITTED) -> Prediction:
    """Predicts a row.

    Raises:
        UserError: It cannot be; the message is the reason.
    """
    described = describe(row)
    hardware = machines(described, constants)
    if not _SAID & row.values.keys() and described.run.dtype not in hardware.device.ceiling:
        # Devices before A100 multiply in float16.
        run = replace(described.run, dtype="float16")
        described = replace(described, run=run)
    peaks = hardware.device.peak
    peak = peaks.get(described.run.dtype) or peaks.get("bfloat16") or next(iter(peaks.values()))
    step = step_of(described, constants)
    measured, column = measured_seconds(row, described, peak)
    said = filter(
        None, (*_unsaid(row, described), read_as_share(row, column), *contradicting(row, described, measured))
    )
    return Prediction(replace(described, assumed=(*described.assumed, *said)), measured, column, step)


def _unsaid(row: Row, described: Described) -> list[str]:
    """How a row's numbers are computed where neither it nor the program that it names says that, in words."""
    said = [] if _SAID & row.values.keys() else [described.run.dtype]
    if described.stack == "fsdp":
        known = row.values.keys()
        said += ["not compiled"] if described.compiled is None else []
        said += ["nothing recomputed"] if "recompute" not in known and described.run.recompute == "none" else []
        said += [] if known & {"sharding", "parallelism", "dp_shard"} else ["sharded as by FSDP"]
    return said


def step_of(described: Described, constants: Constants = FITTED) -> StepTime:
    """The forecast of what a row describes.

    Raises:
        UserError: The device does not compute in its precision.
    """
    stack = STACKS[described.stack]
    if described.stack == OWN:
        return traced.step_time(described.run, machines(described, constants))
    how = software(stack, constants.eager_passes, constants.fused_passes, constants.scores_passes)
    how = replace(how, row_scales=described.row_scales)
    if described.compiled is not None:
        how = replace(
            how,
            compiled=described.compiled,
            elementwise_passes=constants.fused_passes if described.compiled else constants.eager_passes,
        )
    if described.fused_attention is not None:
        how = replace(how, fused_attention=described.fused_attention)
    return step_time(replace(described.run, software=how), machines(described, constants))


def machines(described: Described, constants: Constants = FITTED) -> Hardware:
    """The machines of a row: a packaged profile, with the row's network and its program's kernels.

    Raises:
        UserError: Its device is not known.
    """
    stack = STACKS[described.stack]
    found = profile(described.gpu, described.stack)
    within, between = found.within, found.between
    compiled = described.compiled if described.compiled is not None else stack.compiled
    if described.stack == OWN:
        made = found.kernels
    else:
        # An operation of `transformer_work` is about three kernels, and two where neighbours are fused.
        launch = LAUNCH * (2 if compiled else 3)
        made = replace(kernels(found.device.name, stack.attention or "flash2", constants), launch=launch)
    if stack.own_launch:
        made = replace(made, launch=constants.launch)
        within = replace(within, latency=constants.exchange_latency)
        between = replace(between, latency=constants.exchange_latency)
    if described.network is not None:
        between = Link(between.latency, described.network * profiles.LINK_EFFICIENCY)
    return replace(
        found,
        kernels=made,
        devices_per_host=described.devices_per_host or found.devices_per_host,
        within=within,
        between=between,
    )


@lru_cache
def profile(gpu: str, stack: str) -> Hardware:
    """The packaged profile of a device as tables name it: "h100_80gb", "NVIDIA A100-SXM4-40GB".

    Raises:
        UserError: There is none; the message names the nearest.
    """
    if stack == OWN and (gpu.endswith(".json") or "cpu" in gpu.lower()):
        return _of_file(gpu)
    text = gpu.lower().replace("_", "-")
    found = _DEVICES.search(text)
    name = found[1] if found else text
    if name == "a100" and re.search(r"40 ?-?g", text):
        name = "a100-40gb"
    variant = _VARIANTS.search(text)
    if name == "h100" and variant and variant[0].startswith("pci"):
        name, variant = "h100-pcie", None
    if found and variant:
        raise UserError(f"gpu: expected a device that there is a profile of, got {gpu!r}, another {name} than that")
    # torchtitan's tables were measured on machines with 96 GB of HBM2e and 500 W, which they call H100.
    if name == "h100" and ("96" in text or "500" in text or stack == "torchtitan"):
        name = "h100-96gb"
    try:
        hardware = profiles.hardware(name)
    except UserError as error:
        raise UserError(f"gpu: {str(error).removeprefix('--hardware ')}") from None
    said, held = _MEMORY.search(text), hardware.device.memory
    if said and not 0.9 < float(said[1]) * 1e9 / held < 1.06:
        raise UserError(f"gpu: expected {name} with {held / 1e9:.0f} GB, of which there is a profile, got {gpu!r}")
    return hardware


def _of_file(gpu: str) -> Hardware:
    if not gpu.endswith(".json"):
        raise UserError(
            f"gpu: no forecast knows {gpu!r} before it was measured: run paceline plan --here with as many --devices, "
            "and put the path of the file that it keeps in ~/.cache/paceline/hardware here"
        )
    try:
        return profiles.hardware(gpu)
    except UserError as error:
        raise UserError(f"gpu: {error}") from None
