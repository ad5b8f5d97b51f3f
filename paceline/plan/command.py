"""`paceline plan` where the devices are known: what fits, how long a step takes, what to take."""

from __future__ import annotations

from typing import Any

from paceline.command_line import json_file
from paceline.command_line.help_page import fill
from paceline.core.errors import UserError
from paceline.plan import forecast_table as table
from paceline.plan import quantities
from paceline.plan.arguments import PlanArguments
from paceline.plan.budget import Budget, budget
from paceline.plan.numbers import numbers
from paceline.plan.recommend import would_fit
from paceline.plan.request import Request, request
from paceline.plan.search import Found, search


def forecast(options: PlanArguments, devices: int) -> int:
    """Prints a forecast; returns the exit status: 1 where nothing fits.

    Raises:
        UserError: The arguments name what there is not, or sizes that do not go together.
    """
    asked = request(options, devices)
    tokens = quantities.tokens(options.tokens, "--tokens") if options.tokens else 0
    found = search(asked.case, asked.samples, precisions=asked.precisions)
    best = found.recommended
    money = _budget(options, asked, found, tokens)
    changes = [] if best else would_fit(asked.case, asked.samples, asked.precisions[0])
    json_file.write(options.json, _json(asked, found, money, changes))
    if options.json != json_file.SCREEN:
        print(table.head(asked))
        for warning in asked.case.subject.work(1, asked.precisions[0]).warnings:
            print(fill(f"warning: {warning}", "  "))
        print()
        table.show_table(found, options.all)
        table.show_recommended(found, money)
        if best is None:
            table.show_misfit(found, changes)
    if options.write:
        _write(options, asked, found, tokens)
    return 0 if best else 1


def _budget(options: PlanArguments, asked: Request, found: Found, tokens: int) -> Budget | None:
    if not tokens or found.recommended is None:
        return None
    watts = asked.case.hardware.device.watts
    return budget(found.recommended, tokens, watts, options.price, options.power_price)


def _json(asked: Request, found: Found, money: Budget | None, changes: list[str]) -> dict[str, Any]:
    return {**numbers(asked, found), "budget": money.to_dict() if money else None, "would_fit": changes}


def _write(options: PlanArguments, asked: Request, found: Found, tokens: int) -> None:
    from paceline.plan import run_file

    if asked.config is None:
        raise UserError(
            f"--write: paceline train trains presets, which {options.model} is none of; pass the strategy that is "
            "recommended above to pl.parallelize in a loop of your own"
        )
    if found.recommended is None:
        raise UserError("--write: nothing fits, so there is nothing to write")
    context = asked.case.subject.context
    run_file.write(options.write, run_file.run_config(asked.config, found.recommended, context, tokens))
    if options.json != json_file.SCREEN:
        print(f"\n{options.write} runs it: torchrun ... -m paceline train {options.write}")
