"""`paceline plan` where the devices are known: what fits, how long a step takes, what to take."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.command_line import json_file
from paceline.core.errors import UserError
from paceline.plan import buffer_table, quantities, scaling, what_if
from paceline.plan import failures as failing
from paceline.plan import forecast_table as table
from paceline.plan.arguments import PlanArguments
from paceline.plan.budget import Budget, budget
from paceline.plan.buffer_table import buffers
from paceline.plan.case import Case
from paceline.plan.estimate import Estimate, Setting
from paceline.plan.explain import terms
from paceline.plan.failures import Failures
from paceline.plan.numbers import forecast_numbers, setting_numbers
from paceline.plan.recommend import would_fit
from paceline.plan.request import Request, request
from paceline.plan.search import Found, search
from paceline.plan.simulated_memory import simulated_memory
from paceline.plan.text import print_table

_UNANSWERED = frozenset({"tokens", "failures", "explain", "what_if", "scaling", "picture"})
"""Options about what is recommended."""


def forecast(options: PlanArguments, devices: int) -> int:
    """Prints a forecast; returns the exit status: 1 where nothing fits.

    Raises:
        UserError: The arguments name what there is not, or sizes that do not go together.
    """
    asked = request(options, devices)
    if options.write and asked.config is None:
        raise UserError(
            f"--write: paceline train trains presets, which {options.model} is none of; pass the strategy that is "
            "recommended without --write to pl.parallelize in a loop of your own"
        )
    tokens = quantities.tokens(options.tokens, "--tokens") if options.tokens else 0
    began = time.perf_counter()
    found = search(asked.case, asked.samples, precisions=asked.precisions)
    best = found.recommended
    numbers = {**forecast_numbers(asked, found), "search_seconds": time.perf_counter() - began}
    shows = options.json != json_file.SCREEN
    broken = _failures(options, asked.case)
    budgets = _budgets(options, asked.case, found, tokens, broken)
    for shown, each in zip(numbers["settings"], found.best, strict=True):
        if each.setting in budgets:
            shown["budget"] = budgets[each.setting].to_dict()
    if shows:
        table.show_head(asked)
        table.show_table(found, options.all, budgets)
    if best is None:
        numbers["would_fit"] = would_fit(asked.case, asked.samples, asked.precisions[0])
        if shows:
            table.show_misfit(found, numbers["would_fit"])
            table.show_unanswered(_UNANSWERED & {name for name, value in asdict(options).items() if value})
    else:
        if broken is not None:
            numbers["failures"] = broken.to_dict()
        if best.setting in budgets:
            numbers["budget"] = budgets[best.setting].to_dict()
        if shows:
            table.show_recommended(found, best, budgets.get(best.setting), broken)
        numbers |= _about(options, asked, found, best, shows)
    if asked.own is not None:
        from paceline.plan.run_file import estimate_of

        try:
            own: Estimate | UserError = estimate_of(asked.own, asked.case, asked.batch)
        except UserError as error:
            own = error
        numbers["as_it_is"] = {"error": str(own)} if isinstance(own, UserError) else setting_numbers(own)
        if shows:
            table.show_own(options.config, own, best)
    json_file.write(options.json, numbers)
    if options.write:
        _write(options, asked, found, tokens)
    return 0 if best else 1


def _failures(options: PlanArguments, case: Case) -> Failures | None:
    if not options.failures:
        return None
    hosts = math.ceil(case.devices / case.hardware.devices_per_host)
    saving = options.save_seconds or failing.saving_seconds(case.subject.shapes.numel, hosts)
    return failing.failures(3600 * options.failures, saving, options.restart_seconds)


def _budgets(
    options: PlanArguments, case: Case, found: Found, tokens: int, broken: Failures | None
) -> dict[Setting, Budget]:
    """What the tokens take with each setting that fits."""
    useful = broken.goodput if broken else 1.0
    # Where nothing is ever done between two failures, no time is enough.
    if not tokens or not useful:
        return {}
    return {
        each.setting: budget(each, tokens, case.hardware.device.watts, options.price, options.power_price, useful)
        for each in found.best
        if each.fits
    }


def _about(options: PlanArguments, asked: Request, found: Found, best: Estimate, shows: bool) -> dict[str, Any]:
    """Shows what more is asked about the recommended setting, and gives its numbers."""
    case, numbers = asked.case, dict[str, Any]()
    if options.explain:
        told = list(terms(case, best))
        numbers["terms"] = [asdict(term) for term in told]
        numbers["memory_over_time"] = simulated_memory(case, best.setting)
        used = buffers(case.schedule(best.setting.strategy), best.setting.micro_batches)
        numbers["buffers"] = [asdict(each) for each in used]
        if shows:
            table.show_terms(told)
            print()
            print_table(buffer_table.HEADS, buffer_table.rows(used), left=5)
    if options.what_if:
        changed = list(what_if.changes(case, asked.samples, found))
        numbers["what_if"] = [change.to_dict() for change in changed]
        if shows:
            print()
            print_table(what_if.HEADS, [what_if.cells(change, best) for change in changed])
    if options.scaling or options.picture:
        points = list(scaling.curve(case, asked.samples, best.setting.strategy.precision))
        numbers["scaling"] = scaling.to_dict(points)
        if options.picture:
            title = f"{case.subject.name} on {case.hardware.device.name}, {asked.samples:,} samples on each device"
            scaling.draw(points, f"{title}, or {asked.batch:,} in all", Path(options.picture))
        if shows and options.scaling:
            table.show_scaling(points)
    return numbers


def _write(options: PlanArguments, asked: Request, found: Found, tokens: int) -> None:
    from paceline.plan import run_file

    assert asked.config is not None
    if found.recommended is None:
        raise UserError("--write: nothing fits, so there is nothing to write")
    context = asked.case.subject.context
    run_file.write(options.write, run_file.run_config(asked.config, found.recommended, context, tokens))
    if options.json != json_file.SCREEN:
        print(f"\n{options.write} runs it: torchrun ... -m paceline train {options.write}")
