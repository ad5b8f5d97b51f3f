"""What a checkpoint holds: every tensor's ranges and checksums, and all values that are no tensors, as JSON. Pure.

A range counts elements of a tensor in row-major order, whatever its strides in memory were, so that any number of ranks
can read what any other number wrote.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from paceline.core.errors import UserError

FORMAT = "paceline checkpoint 1"
NAME = "manifest.json"
BLOCK_BYTES = 1 << 20
"""Each so many bytes of a part have a checksum."""

_FILE = re.compile(r"rank-\d{5,9}\.safetensors")
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}
"""Bytes of an element by the name of its dtype; other dtypes are not stored."""


class DamagedError(UserError):
    """What is read is not what was written."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of a tensor, in one file under the tensor's own name.

    Attributes:
        file: Its name in the checkpoint's folder.
        start: First element, in row-major order.
        stop: First element after it.
        checksums: CRC-32 of each `BLOCK_BYTES` bytes; the last block may be short.
    """

    file: str
    start: int
    stop: int
    checksums: tuple[int, ...]


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor.

    Attributes:
        dtype: Name of the dtype without its module.
        shape: Its whole shape.
        parts: Its elements, in order, each once.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a checkpoint but the elements of its tensors.

    Attributes:
        format: `FORMAT`.
        step: How many steps were done.
        world_size: Ranks that saved it.
        strategy: How they shared the work: fields of `Strategy`.
        versions: Of paceline, torch and Python.
        tensors: By name.
        values: What all ranks have in common, encoded (`plain`): optimizers, schedulers, extra.
        ranks: What each rank has of its own, encoded: random states, loaders.
    """

    format: str
    step: int
    world_size: int
    strategy: dict[str, Any]
    versions: dict[str, str]
    tensors: dict[str, Stored]
    values: dict[str, Any]
    ranks: tuple[dict[str, Any], ...]


def merged(contents: Iterable[Mapping[str, Stored]]) -> dict[str, Stored]:
    """The parts of all ranks, in order.

    Raises:
        UserError: They do not make up every tensor once.
    """
    found: dict[str, Stored] = {}
    for tensors in contents:
        for name, stored in tensors.items():
            before = found.get(name)
            if before is not None and (before.dtype, before.shape) != (stored.dtype, stored.shape):
                raise UserError(f"ranks hold {name} as {_kind(before)} and as {_kind(stored)}")
            parts = (*before.parts, *stored.parts) if before is not None else stored.parts
            found[name] = msgspec.structs.replace(stored, parts=parts)
    result = {}
    for name, stored in found.items():
        result[name] = msgspec.structs.replace(stored, parts=tuple(sorted(stored.parts, key=lambda part: part.start)))
        if (wrong := _wrong_with(result[name])) is not None:
            raise UserError(f"{name}: {wrong}")
    return result


def to_bytes(manifest: Manifest) -> bytes:
    """As a file holds it: JSON, with a checksum of all of it."""
    body = _canonical(msgspec.to_builtins(manifest))
    return b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body)


def from_bytes(data: bytes) -> Manifest:
    """Reads what `to_bytes` wrote.

    Raises:
        ValueError: It is something else, damaged, or contradicts itself; says what.
    """
    try:
        whole = json.loads(data)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(whole, dict) or set(whole) != {"crc32", "manifest"} or not isinstance(whole["manifest"], dict):
        raise ValueError("it is no manifest of a checkpoint")
    if whole["manifest"].get("format") != FORMAT:
        raise ValueError(f"its format is {whole['manifest'].get('format')!r}; this version reads {FORMAT!r}")
    if zlib.crc32(_canonical(whole["manifest"])) != whole["crc32"]:
        raise ValueError("its checksum is wrong: some of it has changed since it was written")
    try:
        manifest = msgspec.convert(whole["manifest"], Manifest)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if len(manifest.ranks) != manifest.world_size or manifest.step < 0:
        raise ValueError(f"{manifest.world_size} ranks at step {manifest.step} have {len(manifest.ranks)} states")
    for name, stored in manifest.tensors.items():
        if (wrong := _wrong_with(stored)) is not None:
            raise ValueError(f"{name}: {wrong}")
    return manifest


def _wrong_with(stored: Stored) -> str | None:
    """Why a tensor cannot be as it is said to be; None where nothing is wrong."""
    item = ITEM_BYTES.get(stored.dtype)
    if item is None:
        return f"dtype {stored.dtype} is not stored"
    if any(extent < 0 for extent in stored.shape):
        return f"its shape is {list(stored.shape)}"
    ends = [0, *(part.stop for part in stored.parts)]
    starts = [*(part.start for part in stored.parts), stored.numel]
    for part in stored.parts:
        if not _FILE.fullmatch(part.file):
            return f"no rank writes a file named {part.file!r}"
        if part.stop <= part.start:
            return f"a part goes from element {part.start} to {part.stop}"
        if len(part.checksums) != block_count(part, item):
            return f"elements {part.start} to {part.stop} have {len(part.checksums)} checksums"
    for end, start in zip(ends, starts, strict=True):
        if end != start:
            return f"elements {min(end, start)} to {max(end, start)} are {'missing' if end < start else 'there twice'}"
    if any(before.start > after.start for before, after in pairwise(stored.parts)):
        return "its parts are in disorder"
    return None


def block_count(part: Part, item: int) -> int:
    """Number of blocks of a part whose elements have so many bytes."""
    return -(-(part.stop - part.start) * item // BLOCK_BYTES)


def _kind(stored: Stored) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def _canonical(value: Any) -> bytes:
    """The same bytes for what was read as for what was written, in its order, so that a checksum can be made again."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
