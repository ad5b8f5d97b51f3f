"""What gives other values each time it is asked: random generators, whose state can be put back, and iterators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

Drawn = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
"""Random generators of torch, Python and numpy."""
States = list[tuple[Drawn, Any]]


def is_drawn_from(value: Any) -> bool:
    """Whether it is a random generator, or an iterator of Python's own, as a generator function gives."""
    if isinstance(value, Iterator):
        return type(value).__module__ in ("builtins", "itertools")
    return isinstance(value, Drawn) and not isinstance(value, random.SystemRandom)


def states(generators: Iterable[Drawn]) -> States:
    """Random generators with their states."""
    return [(each, _state(each)) for each in generators]


def set_states(found: States) -> None:
    """Puts back what `states` gave."""
    for each, state in found:
        if isinstance(each, random.Random):
            each.setstate(state)
        elif isinstance(each, np.random.Generator):
            each.bit_generator.state = state
        else:
            each.set_state(state)


def _state(generator: Drawn) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()
