"""What binds each strategy, what a rank holds of each kind, and what a budget of tokens takes: a second table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.plan.budget import Budget
from paceline.plan.estimate import Estimate, Setting
from paceline.plan.quantities import gib, short

_SHORT = {"parameters": "param", "gradients": "grad", "optimizer": "optim", "activations": "activ"}
LEAST = 2**26
"""Bytes below which a kind is not worth a column."""


def table(
    names: Sequence[str], shown: Sequence[Estimate], budgets: Mapping[Setting, Budget]
) -> tuple[tuple[str, ...], list[Sequence[str]]]:
    """Its heads and rows.

    Args:
        names: How each is called.
        shown: Settings, in the order of the table.
        budgets: What the tokens take; none where no tokens are asked about.
    """
    kinds = [
        kind for kind in shown[0].memory.by_kind if any(each.memory.by_kind.get(kind, 0) >= LEAST for each in shown)
    ]
    has_energy = any(each.kilowatt_hours for each in budgets.values())
    has_cost = any(each.cost for each in budgets.values())
    heads = (
        "strategy",
        "bound",
        *(_SHORT.get(kind, kind) for kind in kinds),
        *(["days"] if budgets else []),
        *(["kWh"] if has_energy else []),
        *(["cost"] if has_cost else []),
    )
    rows: list[Sequence[str]] = []
    for called, each in zip(names, shown, strict=True):
        found = budgets.get(each.setting)
        rows.append(
            (
                called,
                each.bound,
                *(gib(each.memory.by_kind.get(kind, 0)) for kind in kinds),
                *([f"{found.seconds / 86400:.3g}" if found else ""] if budgets else []),
                *([short(found.kilowatt_hours) if found else ""] if has_energy else []),
                *([short(found.cost) if found else ""] if has_cost else []),
            )
        )
    return heads, rows
