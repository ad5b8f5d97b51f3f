"""What one fault is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.faults.training import STEPS, Training


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: As it is asked for.
        done: What is done.
        expected: What is expected of the training, besides the losses of one that was not disturbed.
        act: Starts the training and strikes it; returns what shows that it was struck.
        trains: Whether there is a run, which is then brought to its end and compared.
        long: Whether it takes minutes, or root.
        steps: Of the training.
        missing: What the machine lacks, in words; empty for nothing.
    """

    name: str
    done: str
    expected: str
    act: Callable[[Training], str]
    trains: bool = True
    long: bool = False
    steps: int = STEPS
    missing: Callable[[], str] = lambda: ""
