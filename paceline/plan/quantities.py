"""Numbers as people write and read them on the planner's command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from paceline.command_line.quantities import digits
from paceline.core.errors import UserError
from paceline.plan.text import count

_WRITTEN = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?(?:e\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
"""Commas stand between thousands only: 1,5M is 1.5 million where commas are decimal points, and refused."""

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BINARY = _DECIMAL | {"k": 2**10, "m": 2**20, "g": 2**30}


def tokens(text: str, option: str) -> int:
    """A number of tokens such as 4M, 300B or 1.5T.

    Raises:
        UserError: It is none, or less than one.
    """
    return _number(text, option, _DECIMAL)


def _number(text: str, option: str, sizes: Mapping[str, int]) -> int:
    match = _WRITTEN.fullmatch(text.strip())
    if match is not None:
        number = float(match[1].replace("_", "").replace(",", "")) * sizes[match[2].lower()]
        if 1 <= number < 1e18 and math.isclose(number, round(number), rel_tol=1e-12):
            return round(number)
    raise UserError(f"{option}: expected a whole number of tokens such as 500000, 4M or 1.5T, got {text!r}")


def samples(batch_tokens: str, context: int, devices: int) -> int:
    """Samples of a step on one device, from a step's tokens.

    As is usual, k, M and G of a batch may be 1,024s: 4M is 4,194,304 tokens where 4,000,000 are no whole samples, or
    devices cannot share these.

    Raises:
        UserError: They are no whole number of samples, or devices cannot share these equally.
    """
    given = tokens(batch_tokens, "--batch-tokens")
    binary = _number(batch_tokens, "--batch-tokens", _BINARY)
    counts = [each // context for each in (given, binary) if each % context == 0]
    whole = next((count for count in counts if count % devices == 0), counts[-1] if counts else 0)
    if not whole:
        near = max(1, round(given / context)) * context
        raise UserError(
            f"--batch-tokens {batch_tokens}: {given:,} tokens are no whole number of samples of {context:,} tokens; "
            f"the nearest that is: {near}, or choose another --context"
        )
    return share(whole, devices, f"--batch-tokens {batch_tokens}")


def share(whole: int, devices: int, what: str) -> int:
    """Samples of a step on one device.

    Raises:
        UserError: Devices cannot share them equally; it says how many could.
    """
    if whole % devices == 0:
        return whole // devices
    fewer = max(count for count in range(1, min(whole, devices) + 1) if whole % count == 0)
    more = -(-whole // devices) * devices
    raise UserError(
        f"{what}: {count(devices, 'device')} cannot share the step's {count(whole, 'sample')} equally, and no "
        f"forecast is made of unequal shares; use {count(fewer, 'device')}, or a batch of {count(more, 'sample')}"
    )


def short(number: float) -> str:
    """Three digits and a letter: 674k, 12.3M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{digits(number / size)}{letter}"
    return digits(number)


def si(number: float) -> str:
    """As `short`, with the G of units: 3.35T, 360G."""
    return short(number).replace("B", "G")


def duration(value: float) -> str:
    """Seconds as minutes, hours or days."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if value >= size:
            return f"{digits(value / size)} {name}"
    return f"{digits(value)} seconds"


def gib(size: float) -> str:
    """Bytes in GiB, as a number."""
    number = size / 2**30
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"
