"""The states of this process's random numbers: torch's, on CPU and GPU, Python's, NumPy's and a loop's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.core.errors import UserError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""What a loop draws from besides the generators that a process has anyway."""


def random_states(device: torch.device, own: Sequence[Generator] = ()) -> dict[str, Any]:
    """All of them, as `set_random_states` takes them.

    Raises:
        UserError: One of `own` is no generator.
    """
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states | {"own": [_state(generator) for generator in own]}


def set_random_states(states: dict[str, Any], device: torch.device, own: Sequence[Generator] = ()) -> None:
    """Goes on with random numbers where `random_states` was called."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    # None are given where they are not to go on.
    for generator, state in zip(own, states.get("own", ()), strict=False):
        _set_state(generator, state)


def require_generators(own: Sequence[Any], saved: int) -> None:
    """Compares generators with those that were saved.

    Raises:
        UserError: There are more or fewer, or one is none.
    """
    for generator in own:
        _state(generator)
    if own and len(own) != saved:
        raise UserError(f"rng: the checkpoint holds the states of {saved} generators; pl.load was given {len(own)}")


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator() | np.random.RandomState():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
    raise UserError(
        f"rng: expected generators of torch, NumPy or Python, such as torch.Generator, got a {type(generator).__name__}"
    )


def _set_state(generator: Generator, state: Any) -> None:
    match generator:
        case torch.Generator() | np.random.RandomState():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case random.Random():
            generator.setstate(state)
