"""What a budget of tokens takes: days, energy, cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.command_line import quantities as said
from paceline.plan.estimate import Estimate
from paceline.plan.quantities import duration, short


@dataclass(frozen=True)
class Budget:
    """A training on a number of tokens.

    Attributes:
        tokens: How many.
        seconds: How long it takes.
        kilowatt_hours: What devices draw at most meanwhile, hosts and cooling apart; 0: not known.
        cost: Of devices and energy, in the currency of the prices; 0: no prices given.
        useful: Share of the seconds that computes what stays: less than 1 where failures count.
    """

    tokens: int
    seconds: float
    kilowatt_hours: float
    cost: float
    useful: float = 1.0

    @property
    def in_words(self) -> str:
        """The budget in words, such as "1.00T tokens: 17.2 days, 18.5k kWh, costs 66.0k"."""
        useful = f" ({said.share(self.useful)} useful)" if self.useful < 1 else ""
        parts = [duration(self.seconds) + useful]
        if self.kilowatt_hours:
            parts.append(f"{short(self.kilowatt_hours)} kWh of the devices at most")
        if self.cost:
            parts.append(f"costs {self.cost:,.0f}" if self.cost >= 10 else f"costs {self.cost:.2f}")
        return f"{short(self.tokens)} tokens: {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "days": self.seconds / 86400,
            "kilowatt_hours": self.kilowatt_hours,
            "cost": self.cost,
            "useful": self.useful,
        }


def budget(
    estimate: Estimate, tokens: int, watts: float, price: float = 0.0, power_price: float = 0.0, useful: float = 1.0
) -> Budget:
    """What so many tokens take with a setting.

    Args:
        estimate: The setting.
        tokens: The budget.
        watts: That a device draws at most.
        price: Of a device for an hour.
        power_price: Of a kilowatt-hour.
        useful: Share of the time that computes what stays, above 0.
    """
    seconds = tokens / estimate.tokens_per_second / useful
    hours = seconds / 3600
    energy = hours * estimate.devices * watts / 1000
    return Budget(tokens, seconds, energy, hours * estimate.devices * price + energy * power_price, useful)
