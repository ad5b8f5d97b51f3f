"""Hardware profiles: what collectives cost on a machine, as it was measured, in a file that the planner reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np

from paceline.errors import UserError

KIND = "paceline hardware profile"
VERSION = 1
"""Raised whenever an older reader would misunderstand a file."""


@dataclass(frozen=True)
class Fit:
    """The time of a collective as a straight line over its size: alpha + beta * bytes."""

    alpha: float
    """Seconds that a collective of no bytes would take."""
    beta: float
    """Seconds for each byte of the buffer that the collective is over, not of what a rank sends."""
    alpha_error: float
    """Standard error of `alpha`, seconds."""
    beta_error: float
    """Standard error of `beta`, seconds a byte."""
    worst_error: float
    """The largest |predicted - measured| / measured among the sizes that were fitted."""
    smallest: int
    """Bytes of the smallest buffer that was measured."""
    largest: int
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
    ranks: int
    dtype: str
    """Such as "float32": sums of other dtypes take other times."""
    fit: Fit


@dataclass(frozen=True)
class Copy:
    """The bound that memory sets: every rank copying a private buffer to another, all at once."""

    ranks: int
    bytes: int
    """Size of one rank's buffer."""
    seconds: float
    """Time until the slowest rank has its copy."""


@dataclass(frozen=True)
class Host:
    """The machine that was measured."""

    cpu: str
    cores: int
    """Cores that the benchmark could use."""
    memory_bytes: int
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
    columns = np.stack([np.ones(len(times)), np.asarray(sizes, dtype=np.float64)], axis=1) / times[:, None]
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
    residuals = columns @ (alpha, beta) - 1
    variance = float(residuals @ residuals) / (len(times) - 2)
    errors = np.sqrt(variance * np.diag(np.linalg.inv(normal))) / scale
    return Fit(
        alpha=float(alpha),
        beta=float(beta),
        alpha_error=float(errors[0]),
        beta_error=float(errors[1]),
        worst_error=float(np.abs(residuals).max()),
        smallest=min(sizes),
        largest=max(sizes),
    )


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
        data = json.loads(Path(path).read_text(encoding="utf-8"))
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
        profile = _decode(HardwareProfile, data, "")
    except ValueError as error:
        raise UserError(f"{path}: not a hardware profile: {error}; {hint}") from error
    assert isinstance(profile, HardwareProfile)
    return profile


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`: a dataclass, a tuple of one kind, text, or a finite number that is not negative."""
    if is_dataclass(kind):
        known = {field.name for field in fields(kind)}
        if not isinstance(value, dict) or value.keys() != known:
            got = f"the fields {', '.join(value)}" if isinstance(value, dict) else repr(value)
            raise ValueError(f"{where or 'the file'}: expected the fields {', '.join(sorted(known))}; got {got}")
        hints = get_type_hints(kind)
        prefix = f"{where}." if where else ""
        decoded = {name: _decode(hints[name], item, prefix + name) for name, item in value.items()}
        return cast(Any, kind)(**decoded)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {value!r}")
        return tuple(_decode(get_args(kind)[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{where}: expected text, got {value!r}")
        return value
    allowed = (int, float) if kind is float else int
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value < math.inf:
        what = "a number" if kind is float else "a whole number"
        raise ValueError(f"{where}: expected {what} of 0 or more, got {value!r}")
    return kind(value)
