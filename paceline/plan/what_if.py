"""What a plan would be with another network, more devices, or a rank that is slower than the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.command_line import quantities as said
from paceline.plan.case import Case
from paceline.plan.estimate import Estimate
from paceline.plan.hardware import Hardware, Link
from paceline.plan.quantities import short
from paceline.plan.search import Found, search

SLOW = 1.2
"""How many times as long the slow rank computes."""


@dataclass(frozen=True)
class Change:
    """What a change does to the recommended setting, and to what would be recommended.

    Attributes:
        what: The change, in words.
        same: The setting as it was; None where it cannot be made so.
        best: The best with the change; None if nothing fits.
    """

    what: str
    same: Estimate | None
    best: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "what": self.what,
            "seconds_as_it_was": self.same.seconds if self.same else None,
            "seconds": self.best.seconds if self.best else None,
            "strategy": self.best.name if self.best else None,
            "tokens_per_second": self.best.tokens_per_second if self.best else None,
        }


def changes(case: Case, samples: int, found: Found) -> Iterator[Change]:
    """Half and twice the network, twice the devices with the batch that it was, and a slow rank.

    Args:
        case: As it is.
        samples: Of a step on one device.
        found: What was found for it, with something recommended.
    """
    best = found.recommended
    if best is None:
        return
    setting, precision = best.setting, best.setting.strategy.precision

    def best_of(changed: Case, share: int) -> Estimate | None:
        return search(changed, share, precisions=(precision,)).recommended

    def change(words: str, changed: Case) -> Change:
        same, other = changed.estimate(setting), best_of(changed, samples)
        return Change(words, same, other if other and other.seconds < same.seconds else same)

    if case.devices > case.hardware.devices_per_host:
        for factor, words in ((0.5, "half the network between hosts"), (2.0, "twice the network between hosts")):
            yield change(words, replace(case, hardware=with_network(case.hardware, factor)))
    more = replace(case, devices=2 * case.devices)
    share, batch = (samples // 2, "same batch") if samples % 2 == 0 else (samples, "twice the batch")
    yield Change(f"{more.devices:,} devices, {batch}", None, best_of(more, share))
    if case.devices > 1:
        yield change(f"one rank {SLOW:g} times as slow", replace(case, slow_rank=SLOW * case.slow_rank))


def with_network(hardware: Hardware, factor: float) -> Hardware:
    """Machines whose links between hosts have so many times the bandwidth."""
    between = hardware.between
    return replace(hardware, between=Link(between.latency, between.bandwidth * factor))


def cells(change: Change, before: Estimate) -> tuple[str, ...]:
    """A change as a row of a table: what, step, how much longer, tokens/s, what is best then."""
    best = change.best
    if best is None:
        return (change.what, "", "", "", "nothing fits")
    shown = change.same or best
    longer = shown.seconds / before.seconds - 1
    then = best.name if best.setting != before.setting or best.devices != before.devices else "the same"
    gain = f", {said.share(1 - best.seconds / shown.seconds)} shorter" if best.seconds < 0.999 * shown.seconds else ""
    return (
        change.what,
        said.seconds(shown.seconds),
        f"{100 * longer:+.1f} %",
        short(shown.tokens_per_second),
        f"{then}{gain}",
    )


HEADS = ("what if", "step", "", "tokens/s", "best then")
