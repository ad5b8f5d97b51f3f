"""The user's choice of how gradients are synchronised, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UserError


@dataclass(frozen=True)
class Strategy:
    """How N ranks share one model.

    The historical systems of data parallelism are settings of this one value, not classes:
    `SYSTEMS` names them.
    """

    synchronize: Literal["overlap", "after"] = "overlap"
    """When gradients are reduced: while backward still runs, or after it."""

    packing: Literal["bucket", "parameter", "flat"] = "bucket"
    """How gradients are packed: buckets filled from the last layer to the first, one collective per
    parameter, or one flat buffer."""

    bucket_mb: float = 25.0
    """Size of a bucket in MiB, used with packing=bucket. A larger parameter gets a bucket of its own."""

    collective: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """all_reduce: every rank gets the reduced gradients and updates its replica. parameter_server:
    gradients are reduced to rank 0, which alone updates and broadcasts the weights back."""

    gradients: Literal["mean", "sum"] = "mean"
    """What the reduced gradients are over ranks: their mean, as in PyTorch's DDP, or their sum (for losses
    that are sums, to be divided by a global count)."""

    units: tuple[str, ...] = ()
    """Names (or shell patterns) of the modules that are units. Empty: found by looking for repeated blocks."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UserError: A value is out of its range or two settings contradict each other.
        """
        choices = {
            "synchronize": ("overlap", "after"),
            "packing": ("bucket", "parameter", "flat"),
            "collective": ("all_reduce", "parameter_server"),
            "gradients": ("mean", "sum"),
        }
        for field, allowed in choices.items():
            value = getattr(self, field)
            if value not in allowed:
                raise UserError(f"strategy.{field}: expected one of {', '.join(allowed)}, got {value!r}")
        if not self.bucket_mb > 0:
            raise UserError(
                f"strategy.bucket_mb: expected a size above 0 MiB, got {self.bucket_mb}; "
                "for one collective per parameter set strategy.packing to parameter"
            )
        object.__setattr__(self, "units", tuple(self.units))

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes."""
        return int(self.bucket_mb * 2**20)


SYSTEMS: dict[str, Strategy] = {
    "manual": Strategy(synchronize="after", packing="parameter"),
    "parameter server": Strategy(synchronize="after", packing="flat", collective="parameter_server"),
    "flat, after backward": Strategy(synchronize="after", packing="flat"),
    "buckets, after backward": Strategy(synchronize="after"),
    "per parameter, overlapped": Strategy(packing="parameter"),
    "buckets, overlapped": Strategy(),
}
"""The systems that data parallelism went through, oldest first, as settings of the one engine."""
