"""`paceline plan`: what a model costs on so many devices, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.command_line import json_file
from paceline.command_line.json_file import JsonFile
from paceline.command_line.parse import parse
from paceline.core.errors import UserError

if TYPE_CHECKING:
    from paceline.plan.stages import Row, Shapes


@dataclass(frozen=True)
class PlanArguments:
    """Shows what each stage of ZeRO costs a device: bytes held and bytes sent, exactly and without running anything."""

    model: str
    """A preset such as llama-70b, the path of a Hugging Face config.json, or module:function for one of your own."""
    devices: int
    """Number of devices, one rank on each."""
    shard: int = 0
    """Also show zero 3 in groups of so many ranks, each group one copy of the model (hybrid sharding)."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What is computed in; float32 leaves the model as it is."""
    micro_batches: int = 1
    """Micro-batches in an optimizer step."""
    json: JsonFile = ""
    """Where to write the numbers as JSON, in bytes; - prints them and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Prints a plan; returns the exit status.

    Raises:
        UserError: The arguments name no model, or sizes that do not go together.
    """
    if any(argument.partition("=")[0] == "--validate" for argument in arguments):
        from paceline.plan.published.validate_cli import main as validate

        return validate(arguments)
    options = parse(PlanArguments, arguments, "paceline plan")
    for name, value in (("devices", options.devices), ("micro-batches", options.micro_batches)):
        if value < 1:
            raise UserError(f"--{name}: expected 1 or more, got {value}")
    from paceline.plan.models import meta_model
    from paceline.plan.stages import row, shapes, strategies

    model = shapes(meta_model(options.model))
    rows = [
        row(model, strategy, options.devices, options.micro_batches)
        for strategy in strategies(options.shard, options.precision)
    ]
    json_file.write(options.json, _numbers(options, model, rows))
    if options.json != json_file.SCREEN:
        _print_tables(options, model, rows)
    return 0


def _numbers(options: PlanArguments, model: Shapes, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "model": options.model,
        "parameters": model.numel,
        "units": len(model.units),
        "devices": options.devices,
        "micro_batches": options.micro_batches,
        "precision": options.precision,
        "assumed": _assumed(options.precision, model.dtypes),
        "rows": [each.to_dict() for each in rows],
    }


def _print_tables(options: PlanArguments, model: Shapes, rows: Sequence[Row]) -> None:
    size, unit = _unit(max(each.memory.total for each in rows))
    print(
        f"{options.model}: {model.numel:,} parameters in {_count(len(model.units), 'unit')}, "
        f"{_count(options.devices, 'device')}, {_count(options.micro_batches, 'micro-batch', 'es')} a step"
    )
    print(f"Assumed: {_assumed(options.precision, model.dtypes)}")
    for title, what in (("Held by a device", "memory"), ("Sent by a device in a step", "sent")):
        print(f"\n{title}, {unit}")
        bytes_of = [each.to_dict()[what] for each in rows]
        cells = [(each.name, *_cells(sizes, size)) for each, sizes in zip(rows, bytes_of, strict=True)]
        _print_table(("stage", *bytes_of[0]), cells)
    padding = max(each.padding for each in rows) / 2**20
    print(
        f"\nPadding, counted above, is at most {padding:,.1f} MiB in a copy of the parameters. Not counted:\n"
        "activations, what PyTorch, the driver and the collectives' library hold, fragmentation, and the few\n"
        "numbers that ranks agree on in each step."
    )
    if options.devices > 1:
        most = max(rows, key=lambda each: each.communicators)
        print(
            f"Between GPUs a rank holds {rows[0].communicators} (zero 0) to {most.communicators} ({most.name}) of "
            "NCCL's communicators.\nUsers tell of 1 to 2 GB for each; docs/planning.md says what that depends on."
        )


def _assumed(precision: str, dtypes: Iterable[str]) -> str:
    if precision == "float32":
        return (
            f"parameters, gradients and Adam's two states in {' and '.join(dtypes)}, as the model has its parameters."
        )
    return f"{precision} parameters, gradients kept and reduced in fp32; Adam with an fp32 master and two fp32 states."


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number > 1 else ''}"


def _unit(largest: int) -> tuple[int, str]:
    """A unit in which the largest of some sizes is at least 1, if there is one."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def _cells(sizes: dict[str, int], unit: int) -> Iterable[str]:
    return (f"{size / unit:,.2f}" for size in sizes.values())


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    for cells in (heads, *rows):
        first, *others = cells
        print(
            f"{first:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)),
            sep="  ",
        )
