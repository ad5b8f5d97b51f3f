"""How a row's run was divided: over how many devices, in which ranks, and what each takes of a batch. Pure."""

from __future__ import annotations

import re

from paceline.core.errors import UserError
from paceline.plan.published.table import Row

_WORDS = {"tensor": "tp", "pipeline": "pp", "context": "cp"}
DEVICES_PER_HOST = 8
"""Of every machine of the published tables but those that say otherwise."""

_DIMENSION = r"(?<![a-z])(tp|pp|cp|tensor|pipeline|context)"


def stated_ranks(row: Row) -> dict[str, int]:
    """Sizes in words such as "FSDP 8, TP 4", "dp=8 tp=2" or "8-way TP".

    Raises:
        UserError: It speaks of tensor, pipeline or context ranks and neither it nor a column says how many.
    """
    found: dict[str, int] = {}
    text = row.text("parallelism")
    after = rf"{_DIMENSION}(?:[ _-]*parallel\w*)?(?:[ _-]*(?:size|degree))?[ _:=x(-]*(\d+)"
    before = rf"(\d+)[ -]*way[ -]*{_DIMENSION}"
    named = [*re.findall(after, text), *((word, size) for size, word in re.findall(before, text))]
    for word, size in named:
        found[_WORDS.get(word, word)] = int(size)
    for word in re.findall(_DIMENSION, text):
        short = _WORDS.get(word, word)
        if short not in found and short not in row.values:
            raise UserError(
                f"parallelism: expected a number of ranks beside {word!r}, got {row.values['parallelism']!r}"
            )
    return found


def count_per_host(row: Row) -> int:
    """How many devices a host has: as the row says, itself or by both others; else as usual.

    Raises:
        UserError: It contradicts itself.
    """
    devices, hosts, per_host = (row.whole(name) for name in ("devices", "hosts", "devices_per_host"))
    if devices is None or hosts is None:
        return per_host or DEVICES_PER_HOST
    if devices != hosts * (per_host or devices // hosts):
        raise UserError(
            f"nodes: expected {devices} devices on hosts of {per_host or 'as many each'}, got {hosts} hosts"
        )
    return per_host or devices // hosts


def count_devices(row: Row, cut: int, per_host: int) -> int:
    """How many devices a row says: itself, by its hosts, or by data-parallel ranks of `cut` devices each.

    Raises:
        UserError: It says none of these.
    """
    devices, hosts = row.whole("devices"), row.whole("hosts")
    if devices is None and hosts is not None:
        devices = hosts * per_host
    data = row.whole("dp")
    if data is None and row.text("dp_shard").isdecimal() and row.number("dp_shard"):
        data = (row.whole("dp_shard") or 1) * (row.whole("dp_replicate") or 1)
    if devices is None and data is not None:
        devices = data * cut
    if devices is None:
        raise UserError("n_gpus: expected the number of devices, got none")
    return devices


def divide_batch(row: Row, data: int, context: int, stages: int) -> tuple[int, int, list[str]]:
    """Sequences of a micro-batch, micro-batches of a step, and what was assumed: two of three numbers tell the third.

    Raises:
        UserError: Neither a micro-batch nor a batch is said, or they do not divide.
    """
    samples, micro_batches, batch = row.whole("samples"), row.whole("micro_batches"), row.whole("global_batch")
    if batch is None and (tokens := row.number("global_batch_tokens")):
        batch = round(tokens / context)
    if samples is not None and batch is not None:
        if batch % (samples * data):
            raise UserError(f"expected a global batch that {data} ranks x {samples} samples divide, got {batch}")
        return samples, batch // (samples * data), []
    if batch is not None:
        micro_batches = micro_batches or 1
        if batch % (micro_batches * data):
            raise UserError(f"expected a global batch that {data} ranks x {micro_batches} divide, got {batch}")
        each = batch // (micro_batches * data)
        if row.whole("micro_batches") is None and each > 1:
            return 1, each, ["micro-batches of 1 sequence"]
        return each, micro_batches, []
    if samples is not None:
        if micro_batches is None and stages > 1:
            return 1, samples, ["a local batch cut into micro-batches of 1 sequence"]
        return samples, micro_batches or 1, [] if micro_batches else ["one micro-batch a step"]
    raise UserError("expected a micro-batch or a global batch, got neither")


def divide_among_stages(local: int, stages: int) -> tuple[int, int, list[str]]:
    """What a pipeline of torchtitan takes at once is a local batch, in as many micro-batches as it has stages.

    Raises:
        UserError: These do not divide it.
    """
    count = min(local, stages)
    if local % count:
        raise UserError(f"expected a local batch that {count} micro-batches divide, got {local}")
    return local // count, count, [f"a local batch cut into {count} micro-batches, as torchtitan does"]
