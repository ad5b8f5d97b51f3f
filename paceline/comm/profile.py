"""Hardware profiles: what collectives cost on a machine, as it was measured, in a file that the planner reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError

KIND = "paceline hardware profile"
VERSION = 1
"""Raised whenever an older reader would misunderstand a file."""

Number = Annotated[float, msgspec.Meta(ge=0)]
Whole = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Fit:
    """The time of a collective as a straight line over its size: alpha + beta * bytes."""

    alpha: Number
    """Seconds that a collective of no bytes would take."""
    beta: Number
    """Seconds for each byte of the buffer that the collective is over, not of what a rank sends."""
    alpha_error: Number
    """Standard error of `alpha`, seconds."""
    beta_error: Number
    """Standard error of `beta`, seconds a byte."""
    worst_error: Number
    """The largest |predicted - measured| / measured among the sizes that were fitted."""
    smallest: Whole
    """Bytes of the smallest buffer that was measured."""
    largest: Whole
    """Bytes of the largest buffer that was measured."""

    def seconds(self, size: float) -> float:
        """Predicted time over a buffer of `size` bytes."""
        return self.alpha + self.beta * size


@dataclass(frozen=True)
class Cost:
    """What one algorithm of a collective costs between the ranks of one host."""

    transport: str
    """Such as "shared memory"."""
    collective: str
    """Such as "all_reduce"."""
    algorithm: str
    """Such as "ring"."""
    ranks: Whole
    dtype: str
    """Such as "float32": sums of other dtypes take other times."""
    fit: Fit


@dataclass(frozen=True)
class Copy:
    """The bound that memory sets: every rank copying a private buffer to another, all at once."""

    ranks: Whole
    bytes: Whole
    """Size of one rank's buffer."""
    seconds: Number
    """Time until the slowest rank has its copy."""


@dataclass(frozen=True)
class Host:
    """The machine that was measured."""

    cpu: str
    cores: Whole
    """Cores that the benchmark could use."""
    memory_bytes: Whole
    gpus: tuple[str, ...]
    system: str
    """Operating system and its version."""
    python: str
    torch: str


@dataclass(frozen=True)
class HardwareProfile:
    """Measured costs of one machine."""

    host: Host
    copies: tuple[Copy, ...]
    costs: tuple[Cost, ...]


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """The alpha and beta of least relative error.

    Minimises the sum of ((alpha + beta * size - time) / time)^2, so that microseconds count as much as milliseconds.
    Where the best alpha or beta would be negative it is 0, and the other is fitted alone. Standard errors are those
    of weighted linear least squares: the root of the diagonal of RSS / (n - 2) * (A^T A)^-1.

    Args:
        sizes: Bytes.
        seconds: Time at each size, positive.

    Raises:
        ValueError: Fewer than three different sizes: no error could be told.
    """
    if len(set(sizes)) < 3:
        raise ValueError(f"a fit needs at least 3 different sizes, got {len(set(sizes))}")
    times = np.asarray(seconds, dtype=np.float64)
    columns = _by_time(sizes, times)
    best = np.asarray(straight_line(sizes, seconds))
    residuals = columns @ best - 1
    variance = float(residuals @ residuals) / (len(times) - 2)
    scale = np.linalg.norm(columns, axis=0)
    scaled = columns / scale
    errors = np.sqrt(variance * np.diag(np.linalg.inv(scaled.T @ scaled))) / scale
    alpha, beta = best
    return Fit(
        alpha=float(alpha),
        beta=float(beta),
        alpha_error=float(errors[0]),
        beta_error=float(errors[1]),
        worst_error=float(np.abs(residuals).max()),
        smallest=min(sizes),
        largest=max(sizes),
    )


def straight_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The alpha and beta of `fit` alone, which two different sizes are enough for.

    Args:
        sizes: Bytes.
        seconds: Time at each size, positive.

    Raises:
        ValueError: All sizes are the same: what a message costs cannot be told from what a byte costs.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"a line needs at least 2 different sizes, got {len(set(sizes))}")
    columns = _by_time(sizes, np.asarray(seconds, dtype=np.float64))
    # Scaled, as bytes and seconds are many powers of ten apart.
    scale = np.linalg.norm(columns, axis=0)
    scaled = columns / scale
    normal = scaled.T @ scaled
    best = np.linalg.solve(normal, scaled.sum(axis=0))
    if best.min() < 0:
        other = int(best.argmax())
        best = np.zeros(2)
        best[other] = scaled[:, other].sum() / normal[other, other]
    alpha, beta = best / scale
    return float(alpha), float(beta)


def _by_time(sizes: Sequence[float], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """What alpha and beta are multiplied by so that 1 is the measured time: (sizes, 2)."""
    return np.stack([np.ones(len(times)), np.asarray(sizes, dtype=np.float64)], axis=1) / times[:, None]


def write_profile(path: str | Path, profile: HardwareProfile) -> None:
    """Writes a profile as JSON.

    Raises:
        UserError: The file cannot be written.
    """
    text = json.dumps({"kind": KIND, "version": VERSION, **asdict(profile)}, indent=1)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the hardware profile could not be written: {error.strerror}") from error


def read_profile(path: str | Path) -> HardwareProfile:
    """Reads a profile.

    Raises:
        UserError: There is no such file, or what it holds is not a profile of this version; names the first field
            that is wrong.
    """
    hint = "measure one with: paceline bench comm --profile FILE"
    try:
        data: Any = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: no hardware profile could be read: {error.strerror}; {hint}") from error
    except ValueError as error:
        raise UserError(f"{path}: expected a hardware profile in JSON: {error}; {hint}") from error
    if not isinstance(data, dict) or data.pop("kind", None) != KIND:
        raise UserError(f'{path}: expected a hardware profile ("kind": "{KIND}"); {hint}')
    version = data.pop("version", None)
    if version != VERSION:
        raise UserError(f"{path}: expected a hardware profile of version {VERSION}, got {version!r}; {hint}")
    try:
        return msgspec.convert(data, HardwareProfile)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: not a hardware profile: {error}; {hint}") from error
