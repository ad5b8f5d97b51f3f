from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.plan.quantities import duration, samples, share, short, tokens


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500000", 500_000),
        ("4M", 4_000_000),
        ("1.5T", 1.5e12),
        ("300b", 3e11),
        ("2_000", 2000),
        ("8,192", 8192),
        ("1e6", 1e6),
        ("1.1M", 1_100_000),
    ],
)
def test_numbers_of_tokens(text: str, number: float) -> None:
    assert tokens(text, "--tokens") == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M",
        "-4M",
        "0",
        "4X",
        "1..5M",
        "nan",
        "inf",
        "1e400",
        "4 M M",
        "1,5M",
        "15,00",
        "1.000.000",
        "4.5",
        "1.0005k",
    ],
)
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(UserError, match="--tokens: expected a whole number of tokens such as"):
        tokens(text, "--tokens")


def test_a_batch_of_millions_may_be_binary() -> None:
    """4 x 2**20 tokens are 512 samples of 8,192; 4,000,000 of 2,000 are 2,000."""
    assert samples("4M", 8192, 64) == 8
    assert samples("4M", 2000, 8) == 250
    assert samples("4194304", 8192, 512) == 1
    assert samples("2G", 2048, 64) == 2**31 // 2048 // 64
    assert samples("1.5M", 8192, 8) * 8 * 8192 == 1.5 * 2**20
    assert samples("0.5M", 8192, 8) * 8 * 8192 == 2**19


def test_a_batch_that_cannot_be_shared_says_what_could() -> None:
    with pytest.raises(UserError, match=r"96 devices cannot share .* 512 samples equally, .* use 64 devices, or"):
        samples("4M", 8192, 96)
    with pytest.raises(UserError, match="batch of 576 samples"):
        samples("4M", 8192, 96)
    with pytest.raises(UserError, match=r"1,000 tokens are no whole number of samples of 8,192 tokens; .* 8192"):
        samples("1000", 8192, 1)
    assert share(12, 4, "batch") == 3


def test_how_they_are_shown() -> None:
    assert [short(each) for each in (674_012, 1e12, 1000, 12.345, 0.5)] == ["674k", "1.00T", "1.00k", "12.3", "0.500"]
    assert [duration(each) for each in (86400 * 17.2, 7200, 90, 5)] == [
        "17.2 days",
        "2.00 hours",
        "1.50 minutes",
        "5.00 seconds",
    ]


def test_of_two_ways_to_read_a_batch_the_one_that_devices_can_share_is_meant() -> None:
    """512k is 500 samples of 1,024 tokens, or 512 of them."""
    assert samples("512k", 1024, 16) == 32
    assert samples("512k", 1024, 10) == 50
