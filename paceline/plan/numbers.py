"""A forecast as JSON-ready numbers, in bytes and seconds. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.plan.estimate import Estimate
from paceline.plan.recommend import reason
from paceline.plan.request import Request
from paceline.plan.search import Found


def forecast_numbers(asked: Request, found: Found) -> dict[str, Any]:
    """What was asked and what was found."""
    case = asked.case
    return {
        "model": case.subject.name,
        "parameters": case.subject.shapes.numel,
        "hardware": case.hardware.device.name,
        "hardware_source": case.hardware.source,
        "devices": case.devices,
        "context": case.subject.context,
        "batch_tokens": asked.batch_tokens,
        "samples_per_device": asked.samples,
        "warnings": list(asked.warnings),
        "looked_at": found.looked_at,
        "simulated": found.simulated,
        "settings": [setting_numbers(each) for each in found.best],
        "recommended": setting_numbers(found.recommended) if found.recommended else None,
        "reason": reason(found),
    }


def setting_numbers(estimate: Estimate) -> dict[str, Any]:
    """One setting: its time by where it goes, its memory by kind."""
    return {
        "name": estimate.name,
        "strategy": asdict(estimate.setting.strategy),
        "micro_batch": estimate.setting.samples,
        "micro_batches": estimate.setting.micro_batches,
        "seconds": estimate.seconds,
        "compute": estimate.compute,
        "slowed": estimate.slowed,
        "exposed": dict(estimate.exposed),
        "optimizer": estimate.optimizer,
        "bubble": estimate.bubble,
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "bound": estimate.bound,
        "sent": estimate.sent,
        "memory": {**estimate.memory.by_kind, "peak": estimate.memory.peak, "steady": estimate.memory.steady},
        "capacity": estimate.capacity,
        "fits": estimate.fits,
        "spare": estimate.spare,
    }
