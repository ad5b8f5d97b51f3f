"""What a budget of tokens takes: days, energy, cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """

    tokens: int
    seconds: float
    kilowatt_hours: float
    cost: float

    @property
    def in_words(self) -> str:
        """The budget in words, such as "1.00T tokens: 17.2 days, 18.5k kWh, costs 66.0k"."""
        parts = [duration(self.seconds)]
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
        }


def budget(estimate: Estimate, tokens: int, watts: float, price: float = 0.0, power_price: float = 0.0) -> Budget:
    """What so many tokens take with a setting.

    Args:
        estimate: The setting.
        tokens: The budget.
        watts: That a device draws at most.
        price: Of a device for an hour.
        power_price: Of a kilowatt-hour.
    """
    seconds = tokens / estimate.tokens_per_second
    hours = seconds / 3600
    energy = hours * estimate.devices * watts / 1000
    return Budget(tokens, seconds, energy, hours * estimate.devices * price + energy * power_price)
