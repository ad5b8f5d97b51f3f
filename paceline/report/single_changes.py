"""What one change would do to a run's step: another stage, bucket size, bandwidth or number of devices. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.command_line import quantities as said
from paceline.core.errors import UserError
from paceline.report.variants import Choices, Setting
from paceline.report.what_if import Predicted, WhatIf

_BANDWIDTHS = (0.5, 2.0)
"""Times the run's own."""


@dataclass(frozen=True)
class Single:
    """One change.

    Attributes:
        words: What it is.
        setting: Of the program.
        times: How many times the run's bandwidth.
        step: What it would take.
    """

    words: str
    setting: Setting
    times: float
    step: Predicted


def single_changes(tried: WhatIf, offered: Choices) -> list[Single]:
    """Each change that goes with the run's other settings, simulated."""
    found = []
    for words, setting, times in _listed(tried, offered):
        try:
            found.append(Single(words, setting, times, tried.predict(setting, times * tried.bandwidth)))
        except UserError:
            continue
    return found


def _listed(tried: WhatIf, offered: Choices) -> Iterator[tuple[str, Setting, float]]:
    own = tried.own
    for stage in offered.stages:
        if stage != own.stage:
            yield f"zero {stage}", replace(own, stage=stage), 1.0
    if tried.uses_buckets(own.stage):
        for size in offered.bucket_mb:
            if size != own.bucket_mb:
                yield f"buckets of {said.digits(size)} MiB", replace(own, bucket_mb=size), 1.0
    for times in _BANDWIDTHS if tried.link.has_limit else ():
        yield f"{'half' if times < 1 else 'twice'} the bandwidth", own, times
    for devices in offered.devices:
        if devices != own.devices:
            yield said.count(devices, "device"), replace(own, devices=devices), 1.0
