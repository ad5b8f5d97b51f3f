from __future__ import annotations

import math

import pytest

from paceline.command_line import quantities as said


@pytest.mark.parametrize(
    ("function", "value", "words"),
    [
        (said.seconds, 0.00312, "3.12 ms"),
        (said.seconds, 0.0, "0 µs"),
        (said.seconds, 2.5e-7, "0.250 µs"),
        (said.seconds, 59.9, "59.9 s"),
        (said.seconds, 95, "1:35 min"),
        (said.seconds, 7384, "2:03:04"),
        (said.size, 3_200_000, "3.05 MiB"),
        (said.size, 0, "0 B"),
        (said.size, 12, "12.0 B"),
        (said.rate, 3.2e9, "3.20 GB/s"),
        (said.rate, None, "–"),
        (said.share, 0.0312, "3.1 %"),
        (said.share, 1.0, "100 %"),
        (said.digits, 1234567.8, "1,234,568"),
        (said.digits, 1e-9, "1.00e-09"),
        (said.digits, -0.0123, "-0.0123"),
        (said.digits, math.nan, "–"),
    ],
)
def test_quantities_are_said_with_three_digits_and_a_unit(function, value, words) -> None:
    assert function(value) == words


def test_things_are_counted_in_one_and_in_many() -> None:
    assert [said.count(n, "step") for n in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
