"""The exact table: bytes held and sent at each stage of ZeRO, which need no hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.command_line import json_file
from paceline.core.errors import UserError
from paceline.plan.arguments import PlanArguments
from paceline.plan.models import meta_model
from paceline.plan.stages import Row, Shapes, row, shapes, strategies
from paceline.plan.text import count, print_table


def show(options: PlanArguments, devices: int) -> None:
    """Prints the table, or writes its numbers.

    Raises:
        UserError: The arguments name no model, or sizes that do not go together.
    """
    if options.micro_batches < 1:
        raise UserError(f"--micro-batches: expected 1 or more, got {options.micro_batches}")
    precision = "bfloat16" if options.precision == "auto" else options.precision
    model = shapes(meta_model(options.model))
    rows = [row(model, strategy, devices, options.micro_batches) for strategy in strategies(options.shard, precision)]
    json_file.write(options.json, _numbers(options, devices, precision, model, rows))
    if options.json != json_file.SCREEN:
        _print_tables(options, devices, precision, model, rows)


def _numbers(
    options: PlanArguments, devices: int, precision: str, model: Shapes, rows: Sequence[Row]
) -> dict[str, Any]:
    return {
        "model": options.model,
        "parameters": model.numel,
        "units": len(model.units),
        "devices": devices,
        "micro_batches": options.micro_batches,
        "precision": precision,
        "assumed": _assumed(precision, model.dtypes),
        "rows": [each.to_dict() for each in rows],
    }


def _print_tables(options: PlanArguments, devices: int, precision: str, model: Shapes, rows: Sequence[Row]) -> None:
    size, unit = _unit(max(each.memory.total for each in rows))
    print(
        f"{options.model}: {model.numel:,} parameters in {count(len(model.units), 'unit')}, "
        f"{count(devices, 'device')}, {count(options.micro_batches, 'micro-batch', 'es')} a step"
    )
    print(f"Assumed: {_assumed(precision, model.dtypes)}")
    for title, what in (("Held by a device", "memory"), ("Sent by a device in a step", "sent")):
        print(f"\n{title}, {unit}")
        bytes_of = [each.to_dict()[what] for each in rows]
        cells = [(each.name, *_cells(sizes, size)) for each, sizes in zip(rows, bytes_of, strict=True)]
        print_table(("stage", *bytes_of[0]), cells)
    padding = max(each.padding for each in rows) / 2**20
    print(
        f"\nPadding, counted above, is at most {padding:,.1f} MiB in a copy of the parameters. Not counted:\n"
        "activations, what PyTorch, the driver and the collectives' library hold, fragmentation, and the few\n"
        "numbers that ranks agree on in each step."
    )
    if devices > 1:
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


def _unit(largest: int) -> tuple[int, str]:
    """A unit in which the largest of some sizes is at least 1, if there is one."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def _cells(sizes: dict[str, int], unit: int) -> Iterable[str]:
    return (f"{size / unit:,.2f}" for size in sizes.values())
