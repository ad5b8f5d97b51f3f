"""Hardware by name: what datasheets say, matmul ceilings as they were measured, and how far real kernels stay below."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from paceline.core.errors import UserError
from paceline.plan import fitted, profile_file
from paceline.plan.hardware import Device, Hardware, Link

TYPICAL_CEILING = 0.8
"""Share of a datasheet's peak that matmuls reach at most where nobody published a measurement: H100's is 0.80, B200's
0.78, A100's 0.87."""
LINK_EFFICIENCY = 0.8
"""Share of a link's datasheet that collectives of large buffers reach: nccl-tests tell of 360 to 370 GB/s of 450."""
WITHIN_LATENCY, BETWEEN_LATENCY = 2e-6, 8e-6
"""Seconds of a step of a ring, between devices of a host and between hosts."""
FRAMEWORK = int(1.5 * 2**30)
"""Bytes that a CUDA context (0.5 to 0.9 GiB) and what NCCL takes for its first collectives take of a device
(stas00/ml-engineering), which PyTorch's allocator does not count."""
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
"""Columns of peaks, by dtype."""


def hardware(name: str) -> Hardware:
    """Machines by a packaged profile's name, or from a file as `paceline plan --here` writes them.

    Args:
        name: Such as "h100", in any case, or the path of a JSON file.

    Raises:
        UserError: There is no profile of that name, and the message names the nearest ones; or the file is none.
    """
    found = packaged().get(_plain(name))
    if found is not None:
        return found
    if name.lower().endswith(".json") or Path(name).is_file():
        return profile_file.read(name)
    near = difflib.get_close_matches(_plain(name), packaged(), n=3, cutoff=0.4)
    near = list(dict.fromkeys(packaged()[each].device.name for each in near))
    asked = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(
        f"--hardware {name}: expected one of {', '.join(names())}, or a profile's file such as `paceline plan --here` "
        f"writes{asked}"
    )


def names() -> list[str]:
    """The shortest name of each packaged profile."""
    return [row["names"].split()[0] for row in _rows()]


@cache
def packaged() -> Mapping[str, Hardware]:
    """All packaged profiles, by each of their names."""
    found: dict[str, Hardware] = {}
    for row in _rows():
        made = _hardware(row)
        for name in (row["name"], *row["names"].split()):
            found[_plain(name)] = made
    return found


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = files("paceline.plan").joinpath("datasheets.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def _hardware(row: Mapping[str, str]) -> Hardware:
    columns = {dtype: f"{short}_tflops" for dtype, short in _SHORT.items()}
    peak = {dtype: float(row[column]) * 1e12 for dtype, column in columns.items() if row[column]}
    measured = float(row["mamf_bf16_tflops"] or 0) * 1e12
    share = measured / peak["bfloat16"] if measured else TYPICAL_CEILING
    device = Device(
        name=row["names"].split()[0],
        # What torch.cuda tells of such a device: what makers call 80 GB is 79.1 GiB.
        memory=int(float(row["memory_gib"]) * 2**30),
        bandwidth=float(row["hbm_gb_s"]) * 1e9,
        peak=peak,
        ceiling={dtype: flops * share for dtype, flops in peak.items()},
        watts=float(row["watts"]),
    )
    return Hardware(
        device=device,
        kernels=fitted.kernels(row["names"].split()[0]),
        devices_per_host=int(row["devices_per_host"]),
        within=Link(WITHIN_LATENCY, float(row["within_gb_s"]) * 1e9 * LINK_EFFICIENCY),
        between=Link(BETWEEN_LATENCY, float(row["between_gb_s"]) * 1e9 * LINK_EFFICIENCY),
        framework=FRAMEWORK,
        source=f"{row['name']}: {row['source']}",
    )
