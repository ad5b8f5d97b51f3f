"""Norms of gradients by parameter and rank, before and after a step's reductions, as a run wrote them down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.command_line import quantities as said
from paceline.report.html import Html, join, tag
from paceline.report.lines import Damage, read_lines
from paceline.report.program import Program

MOST_PARAMETERS, MOST_RANKS = 300, 16
"""As many are shown."""
_SHADES = 4


class Norms(msgspec.Struct, frozen=True):
    """A parameter's in a step: a line of gradient_norms.jsonl.

    Attributes:
        step: Its number, from 1.
        parameter: Its name.
        local: By micro-batch that was reduced, and rank: the rank's own before that; None without a gradient.
        reduced: By rank: what it has afterwards, be that the whole gradient or its shard.
        whole: Of the whole reduced gradient.
    """

    step: int
    parameter: str
    local: list[list[float | str | None]]
    reduced: list[float | str | None]
    whole: float | str | None


@dataclass(frozen=True)
class Sums:
    """What a step's norms say of all parameters together.

    Attributes:
        by_rank: The norm of each rank's own in the last micro-batch that was reduced.
        kept: The norm of what was reduced, as a part of what it would be if all local ones pointed the same way;
            None if that is unknown.
        widest: The parameter in whose norm ranks differ most, and the largest by the smallest; None if none does.
    """

    by_rank: tuple[float, ...]
    kept: float | None
    widest: tuple[str, float] | None


def read_norms(path: Path, damage: Damage) -> tuple[Norms, ...]:
    """The norms of the latest step that has some, in the order of the file.

    Args:
        path: The file; none is an empty one.
        damage: Counts lines that are none.
    """
    latest: dict[str, Norms] = {}
    step = None
    for line in read_lines(path, msgspec.json.Decoder(Norms), damage):
        norms = line.value
        if not _is_sound(norms):
            damage.lines += 1
            continue
        # A step that a run that went back did again is written again.
        if norms.step != step or norms.parameter in latest:
            latest, step = {}, norms.step
        latest[norms.parameter] = norms
    ranks = {len(norms.reduced) for norms in latest.values()}
    return tuple(latest.values()) if len(ranks) == 1 else ()


def _is_sound(norms: Norms) -> bool:
    rows = [*norms.local, norms.reduced]
    words = [value for row in (*rows, [norms.whole]) for value in row if isinstance(value, str)]
    numbers = [value for row in (*rows, [norms.whole]) for value in row if isinstance(value, float)]
    alike = len({len(row) for row in rows}) == 1 and len(norms.local) > 0 and len(norms.reduced) > 0
    return alike and set(words) <= {"inf", "nan"} and all(0 <= number < math.inf for number in numbers)


def sums(norms: Sequence[Norms], divided: int = 1) -> Sums:
    """What they say together.

    Args:
        norms: Of a step.
        divided: By how much the sum was divided to become the reduced gradient.
    """
    ranks = range(len(norms[0].reduced))
    by_rank = tuple(_together([each.local[-1][rank] for each in norms]) for rank in ranks)
    parts = [
        _together([each.local[number][rank] for each in norms])
        for number in range(min(len(each.local) for each in norms))
        for rank in ranks
    ]
    local, whole = sum(parts), divided * _together([each.whole for each in norms])
    kept = whole / local if 0 < local < math.inf else math.inf
    ratios = [(_ratio(each.local[-1]), each.parameter) for each in norms]
    widest, name = max(ratios)
    # The sum is longer than all local ones together only where more came after the copy-in, which is not among these.
    return Sums(by_rank, kept if kept < 1.001 else None, (name, widest) if widest > 1 else None)


def _together(values: Sequence[float | str | None]) -> float:
    return math.hypot(*(float(value) for value in values if value is not None))


def _ratio(values: Sequence[float | str | None]) -> float:
    """The largest of some norms by the smallest; 0 if one of them is missing, or no number above 0."""
    known = [float(value) for value in values if value is not None]
    if len(known) < len(values) or not all(0 < value < math.inf for value in known):
        return 0.0
    return max(known) / min(known)


def sentence(norms: Sequence[Norms], divided: int = 1) -> str:
    """What the table shows, in words; see `sums`."""
    found = sums(norms, divided)
    step = f"In step {norms[0].step:,}"
    if not all(map(math.isfinite, found.by_rank)):
        ranks = [str(rank) for rank, norm in enumerate(found.by_rank) if not math.isfinite(norm)]
        named = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:8])}" + (" and others" if len(ranks) > 8 else "")
        return f"{step} the gradient of {named} was not finite before it was reduced."
    ordered = sorted(range(len(found.by_rank)), key=lambda rank: found.by_rank[rank])
    least, most = ordered[0], ordered[-1]
    shortest, longest = found.by_rank[least], found.by_rank[most]
    if shortest == longest:
        told = f"{step} ranks' gradients were equally long before they were reduced, {said.digits(longest)}"
    else:
        times = f", {longest / shortest:.2f} times that of rank {least}" if shortest > 0 else ""
        told = f"{step} rank {most}'s gradient was the longest before it was reduced, {said.digits(longest)}{times}"
        told += f", the shortest ({said.digits(shortest)})"
    if found.widest is not None:
        told += f"; ranks differ most in {found.widest[0]}, {found.widest[1]:.2f} times"
    if found.kept is None:
        return f"{told}."
    return (
        f"{told}. The sum is {said.share(found.kept)} of what it would be if all that was given pointed the same way."
    )


def norms_by_rank(norms: Sequence[Norms], program: Program | None, is_own_loop: bool = False) -> Html:
    """The part of the page about them.

    Args:
        norms: Of a step; there may be none.
        program: What the run's steps executed; None if that is not known.
        is_own_loop: Whether they are of a loop of the user's own.
    """
    title = tag("h3", "Gradients by parameter and rank")
    if not norms:
        how = "pl.record(model, norms=True)" if is_own_loop else "--log.gradient-norms"
        told = f"Norms of gradients are not written down unless it is asked for: {how}."
        return join([title, tag("p", told, class_="note")])
    ranks = range(min(len(norms[0].reduced), MOST_RANKS))
    # The largest matter most; they stay in the order of the file, that in which they are reduced.
    by_size = sorted(range(len(norms)), key=lambda i: (-_finite(norms[i].whole), i))[:MOST_PARAMETERS]
    shown = [norms[i] for i in sorted(by_size)]
    heads = [
        tag("th", "parameter", scope="col"),
        *(tag("th", f"rank {rank} before", scope="col") for rank in ranks),
        *(tag("th", f"rank {rank} after", scope="col") for rank in ranks),
        tag("th", "whole", scope="col"),
    ]
    rows = []
    for each in shown:
        before, after = each.local[-1], each.reduced
        longest = max((_finite(value) for value in (*before, *after, each.whole)), default=0.0)
        cells = [_cell(value, longest) for part in (before, after) for value in part[: len(ranks)]]
        rows.append(tag("tr", tag("th", each.parameter, scope="row"), *cells, _cell(each.whole, longest)))
    told = sentence(norms, len(norms[0].reduced) if _is_mean(program) else 1)
    caption = f"Norms of gradients in step {norms[0].step:,}, before and after they are reduced"
    whole = tag("table", tag("caption", caption), tag("thead", tag("tr", *heads)), tag("tbody", *rows), id="norms")
    return join(
        [
            title,
            tag("p", told, class_="sentence", id="norms-told"),
            tag("p", _explained(norms, len(shown), len(ranks), program, is_own_loop), class_="note"),
            tag("div", whole, class_="wide norms", tabindex=0, role="region", aria_label=caption),
        ]
    )


def _is_mean(program: Program | None) -> bool:
    return program is not None and program.schedule.strategy.gradients == "mean"


def _explained(norms: Sequence[Norms], parameters: int, ranks: int, program: Program | None, is_own_loop: bool) -> str:
    parts = len(norms[0].local)
    of = "Of the loss that the loop has" if is_own_loop else "Of the loss summed over the batch's tokens"
    told = (
        f"{of}, before clipping. The darker a cell, the closer to the largest of its row. After: what a rank has of "
        f"the {'mean' if _is_mean(program) else 'sum'}, be that all of it or its shard; – is nothing."
    )
    micro_batches = 0 if program is None else program.micro_batches
    if is_own_loop:
        told += " If it multiplies its loss by a scale, so are they."
    elif program is not None and program.schedule.strategy.precision == "float16":
        told += " They are multiplied by the step's loss scale."
    if parts > 1:
        told += f" Each of the {parts} micro-batches is reduced; before is of the last."
    elif micro_batches > 1:
        told += f" Before is of a rank's {micro_batches} micro-batches together, which are reduced once."
    if parameters < len(norms):
        told += f" Shown are the {parameters:,} of {len(norms):,} parameters whose gradients are the longest."
    if ranks < len(norms[0].reduced):
        told += f" Shown are {ranks} of {len(norms[0].reduced):,} ranks."
    return told


def _finite(value: float | str | None) -> float:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _cell(value: float | str | None, longest: float) -> Html:
    if value is None:
        return tag("td", "–")
    if isinstance(value, str):
        return tag("td", value, class_="not-finite")
    shade = math.ceil(_SHADES * value / longest) if longest > 0 else 0
    return tag("td", said.digits(value), class_=f"norm-{shade}", data_value=repr(value))
