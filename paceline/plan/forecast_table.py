"""Forecasts as a terminal shows them: a table of strategies, then the recommended one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from paceline.command_line import quantities as said
from paceline.command_line.help_page import fill
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.plan import detail_table, scaling
from paceline.plan.budget import Budget
from paceline.plan.choice import ALIKE
from paceline.plan.estimate import Estimate, Setting
from paceline.plan.explain import Term
from paceline.plan.failures import Failures
from paceline.plan.quantities import gib, short
from paceline.plan.recommend import in_words, name, reason
from paceline.plan.request import Request
from paceline.plan.scaling import Point
from paceline.plan.search import Found
from paceline.plan.text import count, print_table

_RECOMPUTED = {"none": "none", "keep_attention": "but attn", "unit": "all"}
SHOWN = 8
"""Strategies in the table, unless all are asked for."""

HEADS = (
    "strategy",
    "batch",
    "recompute",
    "step",
    "compute",
    "gather",
    "reduce",
    "update",
    "wait",
    "tokens/s",
    "MFU",
    "GiB",
    "free",
)


def show_head(request: Request) -> None:
    """Prints what is planned, and what could not be found out about it."""
    case = request.case
    hardware, subject = case.hardware, case.subject
    hosts = math.ceil(case.devices / hardware.devices_per_host)
    each = "of" if case.devices % hardware.devices_per_host == 0 else "of up to"
    where = f", {hosts:,} hosts {each} {hardware.devices_per_host}" if hosts > 1 else ""
    samples = count(request.batch, "sample") + (f" of {subject.context:,}" if subject.context > 1 else "")
    print(
        f"{subject.name}, {subject.shapes.numel:,} parameters, on {case.devices:,} x {hardware.device.name}{where}\n"
        f"a step: {count(request.batch_tokens, 'token')}, {samples}, {request.samples:,} on each device"
    )
    for warning in request.warnings:
        print(fill(f"warning: {warning}", "  "))
    print()


def show_table(found: Found, everything: bool, budgets: Mapping[Setting, Budget]) -> None:
    """Prints the strategies, the fastest first: their times, then what binds them and what they hold and take.

    Args:
        found: What a search found.
        everything: Whether all are shown.
        budgets: Of those that fit; none where no tokens are asked about.
    """
    shown = list(found.best) if everything else chosen(found)
    unit, times = (1.0, "seconds") if min(each.seconds for each in shown) >= 1 else (1e3, "milliseconds")
    print_table(HEADS, [_cells(name(found, each), each, unit) for each in shown], left=3)
    left = len(found.best) - len(shown)
    more = f"; {left} more with --all" if left else ""
    print(
        f"batch: micro-batches x samples. Times in {times}; gather, reduce: waited for. free: of "
        f"{gib(found.best[0].capacity)}{more}"
    )
    print()
    print_table(*detail_table.table([name(found, each) for each in shown], shown, budgets), left=2)
    print("GiB of a rank when it holds most, by kind")


def chosen(found: Found) -> list[Estimate]:
    """Each stage over all ranks, and of the groups the best of each stage, as far as there is room."""
    picked: list[Estimate] = []
    seen: set[tuple[int, bool, str]] = set()
    for each in found.best:
        strategy = each.setting.strategy
        sort = (strategy.stage, bool(strategy.shard), strategy.precision)
        if sort not in seen:
            seen.add(sort)
            picked.append(each)
    return picked[:SHOWN]


def _cells(called: str, each: Estimate, unit: float) -> Sequence[str]:
    strategy = each.setting.strategy
    exposed = dict(each.exposed)
    gather = exposed.pop("all_gather", 0.0)
    return (
        called,
        f"{each.setting.micro_batches} x {each.setting.samples}",
        _recomputed(strategy),
        *(
            _number(unit * part)
            for part in (each.seconds, each.compute, gather, sum(exposed.values()), each.optimizer, each.bubble)
        ),
        short(each.tokens_per_second),
        f"{100 * each.mfu:.1f}%",
        gib(each.memory.peak),
        f"{'' if each.fits else '-'}{gib(abs(each.spare))}",
    )


def _recomputed(strategy: Strategy) -> str:
    every = " /2" if strategy.recompute_every == 2 else ""
    return f"{_RECOMPUTED[strategy.recompute]}{every}"


def _number(number: float) -> str:
    if number < 5e-4:
        return "0"
    return f"{number:.3f}" if number < 9.9995 else f"{number:.2f}" if number < 99.995 else f"{number:,.0f}"


def show_recommended(found: Found, best: Estimate, budget: Budget | None, failures: Failures | None) -> None:
    """Prints the recommended setting: why, where its time and memory go, what binds it."""
    print()
    print(fill(f"Take {in_words(best, name(found, best))}: {reason(found)}.", "  "))
    waits = [f"{kind} {said.seconds(time)}" for kind, time in _longest(best)]
    if best.slowed >= 0.01 * best.seconds:
        waits[0] += f" ({said.seconds(best.slowed)} of it as it shares the device with communication)"
    print(fill(f"  time    {said.seconds(best.seconds)}: {', '.join(waits)}; bound by {best.bound}", " " * 10))
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in best.memory.by_kind.items() if size >= 2**26)
    print(
        fill(
            f"  memory  {gib(best.memory.peak)} of {gib(best.capacity)} GiB in {best.memory.moment}: {kinds}", " " * 10
        )
    )
    print(f"  sends   {said.size(best.sent)} from each rank in a step")
    if budget is not None:
        print(f"  budget  {budget.in_words}")
    if failures is not None:
        print(fill(f"  faults  {failures.in_words}", " " * 10))


def show_own(config: str, own: Estimate | UserError, best: Estimate | None) -> None:
    """Prints what a configuration takes as it is, beside the recommended setting."""
    if isinstance(own, UserError):
        told = str(own)
    else:
        told = f"{in_words(own)}, in {own.setting.strategy.precision}: {said.seconds(own.seconds)} a step"
        if not own.fits:
            told += f", which misses by {gib(-own.spare)} GiB"
        elif best is not None:
            slower = own.seconds / best.seconds - 1
            beside = (
                "as fast" if abs(slower) < ALIKE else f"{said.share(abs(slower))} {'longer' if slower > 0 else 'less'}"
            )
            told += f", {beside}, and {gib(own.spare)} GiB free"
    print()
    print(fill(f"{config} as it is: {told}.", "  "))


def show_terms(terms: Sequence[Term]) -> None:
    """Prints each term with its formula, and below it its source."""
    print()
    width = max(len(term.name) for term in terms)
    for term in terms:
        print(fill(f"{term.name:<{width}}  {term.value} = {term.formula}", " " * (width + 2)))
        print(fill(f"{'':<{width}}  [{term.source}]", " " * (width + 3)))


def show_scaling(points: Sequence[Point]) -> None:
    """Prints the way from one device to a hundred thousand."""
    print()
    print_table(scaling.HEADS, [scaling.cells(point) for point in points], left=2)
    print(
        fill(
            "left: as many samples on each device; right: the same batch, where devices share it equally; comm.: "
            "waiting, and computing slower beside it"
        )
    )
    print(fill(scaling.in_words(points)[:1].upper() + scaling.in_words(points)[1:] + "."))


def _longest(best: Estimate) -> list[tuple[str, float]]:
    parts = {"compute": best.compute, **{f"wait for {kind}": time for kind, time in best.exposed.items()}}
    parts |= {"update": best.optimizer, "wait for the slowest rank": best.bubble}
    return [(kind, time) for kind, time in parts.items() if time >= 1e-4 * best.seconds]


def show_unanswered(options: Collection[str]) -> None:
    """Prints which options had nothing to be about, where nothing fits."""
    if options:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(options))
        print(fill(f"Nothing is said of {named}, as they are about a setting that fits.", "  "))


def show_misfit(found: Found, changes: Sequence[str]) -> None:
    """Prints by how much the best misses where nothing fits, and what would make it fit."""
    best = found.best[0]
    biggest = sorted(best.memory.by_kind.items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{kind} {gib(size)}" for kind, size in biggest)
    print()
    print(
        fill(
            f"Nothing fits: {in_words(best, name(found, best))} misses by {gib(-best.spare)} GiB "
            f"({gib(best.memory.peak)} of {gib(best.capacity)}: {most}).",
            "  ",
        )
    )
    would = " or ".join(changes)
    print(
        fill(f"It would fit with {would}." if would else "More devices alone do not help: use a smaller model.", "  ")
    )
