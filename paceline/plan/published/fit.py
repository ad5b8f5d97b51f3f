"""Fits the planner's few constants to published step times: `python -m paceline.plan.published.fit [FOLDER]`.

Least squares of the logarithm of predicted over measured, so that a forecast twice too long weighs as one half too
short; errors beyond 10 % weigh as their root (Huber 1964), as a bad run is no measurement of a constant. The logarithm
of each constant is drawn to what was held likely before (`fitted.PRIOR`), as strongly as that was known. Rows of
vtrain_a100.csv, many and alike, weigh together as much as those of llm_foundry.csv.

What is left out of a fold is forgotten by one Gauss-Newton step from the fit to all rows, which takes no time. What is
forecast then differs from what fitting again gives by 0.6 % at most where one of nine sizes of models is left out, and
by 1.3 % where two are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from paceline.plan.fitted import PRIOR, SPREAD, Constants
from paceline.plan.published.describe import Sample
from paceline.plan.published.predict import step_of
from paceline.plan.published.sets import find_folder, fitted_samples

Array = NDArray[np.float64]

NAMES = tuple(field.name for field in fields(Constants))

HUBER = 0.1
"""Errors up to this weigh as their square."""
NOISE = 0.05
"""Of a row, as a share: what a prior's spread is weighed against."""


@dataclass(frozen=True)
class Fit:
    """Constants and what they rest on.

    Attributes:
        constants: The fitted ones.
        errors: Their standard errors.
        samples: The rows, in the order of `jacobian`.
        residuals: Weighted logarithms of predicted over measured.
        jacobian: How they change with the logarithm of each constant.
    """

    constants: Constants
    errors: Constants
    samples: tuple[Sample, ...]
    residuals: Array
    jacobian: Array

    def without(self, rows: Sequence[int]) -> Constants:
        """The constants as fitted to all rows but these: one Gauss-Newton step."""
        kept = np.ones(len(self.samples), dtype=bool)
        kept[list(rows)] = False
        x = _logarithms(self.constants)
        pull, stiffness = _prior(x)
        jacobian, residuals = self.jacobian[kept], self.residuals[kept]
        step = np.linalg.solve(jacobian.T @ jacobian + np.diag(stiffness), -(jacobian.T @ residuals + pull))
        return _constants(x + np.clip(step, -0.5, 0.5))

    def held_out(self, groups: Sequence[Hashable]) -> list[float]:
        """Relative error of each row when its group was left out of the fit.

        Args:
            groups: Of each row; all alike are left out together.
        """
        members: dict[Hashable, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        found = [0.0] * len(self.samples)
        for rows in members.values():
            constants = self.without(rows)
            for index in rows:
                found[index] = math.expm1(_error(self.samples[index], constants))
        return found


def fit(samples: Sequence[Sample], rounds: int = 12) -> Fit:
    """Fits the constants: Levenberg and Marquardt's damped Gauss-Newton steps until they change little.

    Args:
        samples: The rows.
        rounds: Steps at most.
    """
    x = _logarithms(PRIOR)
    damping = 1e-3
    residuals = _residuals(samples, x)
    cost = _cost(residuals, x)
    for _ in range(rounds):
        jacobian = _jacobian(samples, x, residuals)
        pull, stiffness = _prior(x)
        normal, slope = jacobian.T @ jacobian + np.diag(stiffness), jacobian.T @ residuals + pull
        for _ in range(8):
            step = np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope), -0.7, 0.7)
            tried = _residuals(samples, x + step)
            better = _cost(tried, x + step)
            if better < cost:
                break
            damping *= 5
        else:
            break
        gained, x, residuals, cost = (cost - better) / cost, x + step, tried, better
        damping /= 5
        if gained < 1e-5:
            break
    return at(_constants(x), samples)


def at(constants: Constants, samples: Sequence[Sample]) -> Fit:
    """What constants that were fitted to these rows rest on.

    Args:
        constants: The fitted ones.
        samples: The rows, weighted as they were for fitting.
    """
    x = _logarithms(constants)
    residuals = _residuals(samples, x)
    jacobian = _jacobian(samples, x, residuals)
    _, stiffness = _prior(x)
    variance = residuals @ residuals / max(1, len(samples) - len(x))
    covariance = variance * np.linalg.inv(jacobian.T @ jacobian + np.diag(stiffness))
    errors = np.sqrt(np.diag(covariance)) * np.exp(x)
    return Fit(constants, Constants(*map(float, errors)), tuple(samples), residuals, jacobian)


def balanced(sets: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Rows of several sets, each of which weighs as much as the smallest."""
    least = min(len(each) for each in sets)
    return [replace(sample, weight=least / len(each)) for each in sets for sample in each]


def _logarithms(constants: Constants) -> Array:
    return np.log([getattr(constants, name) for name in NAMES])


def _constants(x: Array) -> Constants:
    return Constants(*(float(value) for value in np.exp(x)))


def _error(sample: Sample, constants: Constants) -> float:
    return math.log(step_of(sample.described, constants).total / sample.seconds)


def _residuals(samples: Sequence[Sample], x: Array) -> Array:
    constants = _constants(x)
    raw = np.array([_error(sample, constants) for sample in samples])
    huber = np.sign(raw) * np.sqrt(np.maximum(2 * HUBER * np.abs(raw) - HUBER**2, 0.0))
    weights = np.sqrt([sample.weight for sample in samples])
    return np.asarray(np.where(np.abs(raw) > HUBER, huber, raw) * weights, dtype=np.float64)


def _jacobian(samples: Sequence[Sample], x: Array, residuals: Array) -> Array:
    found = np.empty((len(samples), len(x)))
    for index in range(len(x)):
        moved = x.copy()
        moved[index] += 1e-3
        found[:, index] = (_residuals(samples, moved) - residuals) / 1e-3
    return found


def _prior(x: Array) -> tuple[Array, Array]:
    """What draws constants back, and how strongly, in squares of a row's noise."""
    stiffness = (NOISE / np.array([getattr(SPREAD, name) for name in NAMES])) ** 2
    return stiffness * (x - _logarithms(PRIOR)), stiffness


def _cost(residuals: Array, x: Array) -> float:
    pull, _ = _prior(x)
    return float(residuals @ residuals + pull @ (x - _logarithms(PRIOR)))


def main(arguments: Sequence[str]) -> int:
    """Prints constants and their standard errors as `plan/fitted.py` has them; returns the exit status."""
    found = fit(balanced(fitted_samples(find_folder(arguments[0] if arguments else ""))))
    for title, constants in (("FITTED", found.constants), ("ERRORS", found.errors)):
        print(f"{title} = Constants(")
        for name in NAMES:
            print(f"    {name}={float(format(getattr(constants, name), '.3g'))},")
        print(")")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
