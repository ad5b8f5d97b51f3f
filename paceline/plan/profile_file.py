"""Hardware in a file: written by calibration, checked by whoever reads one that a user made or changed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, get_args

import msgspec

from paceline.core.errors import UserError
from paceline.core.ops import COMPUTE, Kind
from paceline.plan.hardware import Hardware

KIND = "paceline planner hardware"
VERSION = 4
UNITS = "bytes, seconds, bytes a second, floating-point operations a second, watts"
"""What the numbers of a file are in. Files say so, and none in other units is believed."""

DTYPES = ("float32", "bfloat16", "float16", "float8")
"""By which names devices have their peaks and ceilings. Plans compute in the first three."""

_MEASURED = re.compile(
    r"update|copy_in|cast|squares"  # ops of the engine
    rf"|({'|'.join(sorted({*get_args(Kind)} - COMPUTE))}) [1-9]\d*"
    r"|\w+ (bool|bfloat16|float(8\w*|16|32|64)|u?int(8|16|32|64)|complex(32|64|128))"
)
"""Names under which rates are looked for: an operator's may be any."""

_LARGEST_FILE = 1_000_000

# Ranges wide enough for a watch and for a wafer; what lies outside of them is in other units or a slip.
_RANGES: dict[str, tuple[float, float, str]] = {
    "device.memory": (1e8, 1e14, "bytes"),
    "device.bandwidth": (1e8, 1e15, "bytes a second"),
    "device.peak": (1e8, 1e18, "floating-point operations a second"),
    "device.ceiling": (1e8, 1e18, "floating-point operations a second"),
    "device.watts": (0.0, 1e5, "watts"),
    "kernels.launch": (0.0, 0.1, "seconds"),
    "kernels.memory_efficiency": (0.01, 2.0, "a share of 1"),
    "kernels.matmul_efficiency": (0.01, 2.0, "a share of 1"),
    "kernels.attention_efficiency": (0.001, 2.0, "a share of 1"),
    "kernels.half_flops": (0.0, 1e15, "floating-point operations"),
    "kernels.matmul_passes": (0.0, 100.0, "a number"),
    "kernels.contention": (0.0, 20.0, "a share of 1"),
    "kernels.straggling": (0.0, 1.0, "a share of 1"),
    "devices_per_host": (1, 1e5, "devices"),
    "within.latency": (0.0, 1.0, "seconds"),
    "within.bandwidth": (1e6, 1e14, "bytes a second"),
    "between.latency": (0.0, 1.0, "seconds"),
    "between.bandwidth": (1e5, 1e14, "bytes a second"),
    "framework": (1e6, 1e12, "bytes"),
    "hooks": (0.0, 0.1, "seconds"),
    "measured.fixed": (0.0, 10.0, "seconds"),
    "measured.per_flop": (0.0, 1e-6, "seconds"),
    "measured.per_byte": (0.0, 1e-6, "seconds"),
    "measured.per_block": (0.0, 1.0, "seconds"),
}


_OR_NONE = frozenset({"framework"})
"""Settings whose number may also be 0, which says that it is not known."""

_PRODUCTS = ("mm", "addmm", "matmul")
"""Operators that reach about what matrices multiply at."""

_SLOWEST, _FASTEST = 1e-3, 1.5
"""Of the device's peak, between which products were ever measured."""


def write(path: str | Path, hardware: Hardware) -> None:
    """Writes hardware that `read` reads.

    Raises:
        OSError: The file cannot be written.
    """
    values = {"kind": KIND, "version": VERSION, "units": UNITS, **asdict(hardware)}
    Path(path).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> Hardware:
    """Reads hardware, and checks that it is whole and in the units that it should be.

    Raises:
        UserError: The file cannot be read, is no such profile, lacks something, or holds a number that no machine has.
    """
    values = _values(path)
    kind = values.pop("kind", None)
    if kind != KIND:
        other = (
            " (`paceline bench comm` made it: it knows of links alone, and goes beside by --collectives)"
            if kind == "paceline hardware profile"
            else ""
        )
        raise UserError(
            f"{path}: expected a planner's hardware (kind {KIND!r}), got kind {kind!r}{other}; `paceline plan --here` "
            "makes one of this machine"
        )
    version = values.pop("version", None)
    if version != VERSION:
        raise UserError(
            f"{path}: expected version {VERSION}, got {version!r}; make it anew with `paceline plan --here`"
        )
    units = values.pop("units", UNITS)
    if units != UNITS:
        raise UserError(f"{path}: units: expected {UNITS!r}, got {units!r}; convert the numbers, then change this line")
    try:
        found: Hardware = msgspec.convert(values, Hardware, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {_explained(str(error))}; `paceline plan --here` makes a whole one") from None
    for name in _unread(values, asdict(found)):
        raise UserError(f"{path}: {name}: a profile has no such value, and a slip would leave what is meant out")
    for name, value in _numbers(asdict(found)):
        _check(path, name, value)
    for name in found.measured:
        if not _MEASURED.fullmatch(name):
            raise UserError(
                f"{path}: measured.{name}: no plan looks for it; expected an operator with a dtype, such as "
                "'mm float32', a collective with its ranks, such as 'all_reduce 2', or update, copy_in, cast or squares"
            )
    _require_likely(path, found)
    for name in ("peak", "ceiling"):
        if unknown := sorted(getattr(found.device, name).keys() - set(DTYPES)):
            near = difflib.get_close_matches(unknown[0], DTYPES, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{path}: device.{name}.{unknown[0]}: expected one of {', '.join(DTYPES)}{hint}")
    for dtype, ceiling in found.device.ceiling.items():
        if ceiling > (peak := found.device.peak.get(dtype, ceiling)):
            raise UserError(
                f"{path}: device.ceiling.{dtype}: expected at most device.peak.{dtype}, {peak:g}, got {ceiling:g}"
            )
    if not found.device.ceiling.keys() & set(DTYPES[:3]):
        raise UserError(f"{path}: device.ceiling: expected a number for at least one of {', '.join(DTYPES[:3])}")
    return found


def _require_likely(path: str | Path, found: Hardware) -> None:
    """Refuses names that would garble what is printed, and measured rates that no work takes or the device denies."""
    for name, text in (("device.name", found.device.name), ("source", found.source)):
        if not text.isprintable():
            raise UserError(f"{path}: {name}: expected one line of printable text, got {text!r}")
    for name, rates in found.measured.items():
        if not any(astuple(rates)):
            raise UserError(f"{path}: measured.{name}: expected seconds above 0, got none of any kind")
        operator, _, dtype = name.partition(" ")
        peak = found.device.peak.get(dtype)
        if peak and operator in _PRODUCTS and rates.per_flop and not _SLOWEST < 1 / rates.per_flop / peak <= _FASTEST:
            raise UserError(
                f"{path}: measured.{name}.per_flop: {rates.per_flop:g} seconds are {1 / rates.per_flop:.3g} operations "
                f"a second, which does not go with device.peak.{dtype}, {peak:.3g}; make it anew with `paceline plan "
                "--here`"
            )


def _values(path: str | Path) -> dict[str, Any]:
    try:
        with Path(path).open(encoding="utf-8-sig") as file:  # as some editors write it
            text = file.read(_LARGEST_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"hardware profile {path}: cannot be read: {reason}") from None
    try:
        if len(text) > _LARGEST_FILE:
            raise ValueError("it is longer than a profile is")
        values = json.loads(text, parse_int=_read, parse_float=_read)
        json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair may be escaped, but is no text
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"hardware profile {path}: is damaged: not JSON ({error}); make it anew with `paceline plan --here`"
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"hardware profile {path}: expected an object of JSON, got {type(values).__name__}")
    return values


def _read(text: str) -> float:
    """A number, whole ones as such however they are written: 8e10 is as many bytes as 80000000000."""
    number = float(text)
    return int(number if "e" in text.lower() or "." in text else text) if number.is_integer() else number


def _explained(message: str) -> str:
    """Msgspec's words, with the path of the value first, and what the value is in."""
    said, _, where = message.partition(" - at `$.")
    where = where.rstrip("`")
    lacking = re.search("missing required field `(.*)`", said)
    name = ".".join(part for part in (where, lacking and lacking[1]) if part)
    known = _RANGES.get(name) or _RANGES.get(name.rpartition(".")[0])
    unit = f", in {known[2]}" if known else ""
    return f"{where}: {said}{unit}" if where else f"{said}{unit}"


def _unread(values: dict[str, Any], read: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if key not in read:
            yield f"{prefix}{key}"
        elif isinstance(value, dict) and isinstance(read[key], dict):
            yield from _unread(value, read[key], f"{prefix}{key}.")


def _numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, str):
            yield f"{prefix}{key}", value


def _check(path: str | Path, name: str, value: float) -> None:
    # Of what goes by names, the range is that of all of them; names may have dots.
    known = f"measured.{name.rpartition('.')[2]}" if name.startswith("measured.") else name
    least, most, unit = _RANGES.get(known) or _RANGES[".".join(name.split(".")[:2])]
    if least <= value <= most or (value == 0 and name in _OR_NONE):  # which neither infinity nor what is no number is
        return
    likely = [word for factor, word in _PREFIXES.get(unit, {}).items() if least <= value * factor <= most]
    hint = f"; is it in {' or '.join(likely)}?" if likely and value > 0 else ""
    raise UserError(f"{path}: {name}: expected {unit}, from {least:g} to {most:g}, got {value:g}{hint}")


_PREFIXES = {
    "bytes": {1e9: "billions (GB)", 1e6: "millions (MB)"},
    "bytes a second": {1e9: "billions (GB/s)", 1e6: "millions (MB/s)", 1e12: "trillions (TB/s)"},
    "floating-point operations a second": {1e12: "trillions (TFLOP/s)", 1e9: "billions (GFLOP/s)"},
    "seconds": {1e-3: "milliseconds", 1e-6: "microseconds"},
    "a share of 1": {1e-2: "percent"},
}
"""Units that people write numbers in, the likeliest first, by those that they should be in."""
