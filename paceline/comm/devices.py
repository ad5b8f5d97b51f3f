"""Which device each rank computes on: ranks tell each other what they see, and all choose the same kind.

A launcher shows each process all GPUs of its host (torchrun), of which it takes that of its local rank, or only its own
(Slurm's `--gpus-per-task=1`, Kubernetes), which is then number 0. What tells them apart is a GPU's UUID.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.comm import meeting
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy

KINDS = ("cpu", "cuda")
_NVIDIA = Path("/dev/nvidia0")


@dataclass(frozen=True)
class Sight:
    """What one rank sees of its host.

    Attributes:
        local_rank: Its number among its host's ranks.
        local_ranks: How many these are.
        wanted: The kind of device that its program asks for; None: whatever fits.
        gpus: How many GPUs it sees.
        uuid: Of the one that it would take; empty where there is none.
        other: Why a device that it has is none that it could take, in words; empty where there is no such device.
    """

    local_rank: int
    local_ranks: int
    wanted: str | None
    gpus: int
    uuid: str
    other: str


def look(wanted: str | None, local_rank: int, local_ranks: int = 1) -> Sight:
    """What this process sees.

    Raises:
        UserError: `wanted` is no kind of device.
    """
    if wanted is not None and wanted not in KINDS:
        raise UserError(f"device: expected cpu or cuda, got {wanted!r}")
    if wanted == "cpu":
        return Sight(local_rank, local_ranks, wanted, 0, "", "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = index_of(local_rank, gpus)
    uuid = _uuid(index) if index < gpus else ""
    return Sight(local_rank, local_ranks, wanted, gpus, uuid, _other() if not gpus else "")


def _other() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type not in KINDS:
        return f"torch sees {accelerator.type}, which paceline does not compute on"
    if _NVIDIA.exists() and torch.version.cuda is None and torch.version.hip is None:
        return "there is an NVIDIA GPU, but this torch was built without CUDA"
    return ""


def index_of(local_rank: int, gpus: int) -> int:
    """Which of the GPUs that it sees is a rank's: the only one, if there is but one."""
    return 0 if gpus == 1 else local_rank


def _uuid(index: int) -> str:
    found = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if found is not None:
        return str(found)
    return f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {index}"


def strategy_on(strategy: Strategy, device: torch.device) -> Strategy:
    """A strategy whose precision is that of a device, where it is left to that.

    Raises:
        UserError: Other settings do not go with this precision.
    """
    if strategy.precision != "auto":
        return strategy
    # Older GPUs compute in bf16 by way of fp32, and take longer for it.
    low = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return replace(strategy, precision="bfloat16" if low else "float32")


def tell_all(sight: Sight, store: Any, rank: int, world_size: int, seconds: float) -> list[Sight]:
    """Every rank's sight; see `meeting.tell_all`."""
    return [Sight(**values) for values in meeting.tell_all(asdict(sight), store, rank, world_size, seconds)]


def choose(sights: Sequence[Sight]) -> tuple[str, str]:
    """The kind of device that all ranks compute on, from what each of them sees.

    Returns:
        "cpu" or "cuda", and what is to be said about devices that stay idle; empty where nothing is.

    Raises:
        UserError: Ranks ask for different kinds, or for GPUs that not every rank has.
    """
    wanted = [sight.wanted for sight in sights]
    if len(set(wanted)) > 1:
        other = next(rank for rank, kind in enumerate(wanted) if kind != wanted[0])
        raise UserError(
            f"device: rank 0 asks for {wanted[0] or 'any'} and rank {other} for {wanted[other] or 'any'}; call "
            "pl.init with the same device on every rank"
        )
    if wanted[0] == "cpu":
        return "cpu", ""
    missing = _missing(sights)
    if not missing:
        return "cuda", "" if wanted[0] == "cuda" else _left_over(sights)
    others = "; ".join(sorted({sight.other for sight in sights if sight.other}))
    if wanted[0] == "cuda":
        why = f" ({others})" if others else ""
        raise UserError(f"device: {missing}{why}; start fewer ranks, give each a GPU of its own, or use the CPU")
    if any(sight.gpus for sight in sights):
        return "cpu", f"GPUs stay idle, all ranks compute on the CPU: {missing}"
    return "cpu", f"{others}: it uses the CPU" if others else ""


def _left_over(sights: Sequence[Sight]) -> str:
    """Which GPUs no rank has taken, on the first host that has some; empty if none has."""
    for rank, sight in enumerate(sights):
        idle = sight.gpus - sight.local_ranks
        if idle > 0:
            return (
                f"{idle} of the {sight.gpus} GPUs that rank {rank} sees stay idle: start {sight.gpus} ranks on its "
                f"host (paceline train --workers {sight.gpus}, torchrun --nproc-per-node {sight.gpus}), or show it "
                "those that it is to use (CUDA_VISIBLE_DEVICES)"
            )
    return ""


def _missing(sights: Sequence[Sight]) -> str:
    """Why not every rank has a GPU of its own; empty if it has."""
    for rank, sight in enumerate(sights):
        if not sight.uuid:
            return f"rank {rank}, local rank {sight.local_rank}, needs a GPU of its own, but sees {sight.gpus}"
    owners: dict[str, int] = {}
    for rank, sight in enumerate(sights):
        if (first := owners.setdefault(sight.uuid, rank)) != rank:
            return f"ranks {first} and {rank} see the same GPU ({sight.uuid}) as theirs"
    return ""
