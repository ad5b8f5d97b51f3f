from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.profile import (
    Copy,
    Cost,
    Fit,
    HardwareProfile,
    Host,
    fit,
    read_profile,
    straight_line,
    write_profile,
)
from paceline.core.errors import UserError

SIZES = [2**exponent for exponent in range(10, 27, 2)]
ALPHAS = st.floats(1e-6, 1e-3)
BETAS = st.floats(1e-11, 1e-8)


@given(ALPHAS, BETAS)
def test_the_fit_recovers_alpha_and_beta(alpha: float, beta: float) -> None:
    found = fit(SIZES, [alpha + beta * size for size in SIZES])
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.beta == pytest.approx(beta, rel=1e-6)
    assert found.alpha_error < 1e-6 * alpha
    assert found.beta_error < 1e-6 * beta
    assert found.worst_error < 1e-6
    assert (found.smallest, found.largest) == (SIZES[0], SIZES[-1])
    assert found.seconds(10**6) == pytest.approx(alpha + beta * 10**6)


def test_standard_errors_are_those_that_repeated_measurements_show() -> None:
    generator = random.Random(0)
    fits = [fit(SIZES, [(2e-5 + 3e-10 * size) * (1 + generator.gauss(0, 0.05)) for size in SIZES]) for _ in range(300)]
    for values, errors in (
        ([each.alpha for each in fits], [each.alpha_error for each in fits]),
        ([each.beta for each in fits], [each.beta_error for each in fits]),
    ):
        assert statistics.mean(errors) == pytest.approx(statistics.stdev(values), rel=0.2)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_alpha_and_beta_are_never_negative_and_no_others_err_less(times: list[float]) -> None:
    def error(alpha: float, beta: float) -> float:
        return sum(((alpha + beta * size - time) / time) ** 2 for size, time in zip(SIZES, times, strict=True))

    found = fit(SIZES, times)
    assert found.alpha >= 0
    assert found.beta >= 0
    least = error(found.alpha, found.beta)
    for alpha, beta in ((1.01, 1.0), (0.99, 1.0), (1.0, 1.01), (1.0, 0.99)):
        assert error(found.alpha * alpha, found.beta * beta) >= least * (1 - 1e-9)
    worst = max(abs(found.seconds(size) - time) / time for size, time in zip(SIZES, times, strict=True))
    assert found.worst_error == pytest.approx(worst)


def test_microseconds_count_as_much_as_milliseconds() -> None:
    times = [1e-5 + 1e-10 * size for size in SIZES]
    # 10 % of the slowest, many times the whole of the fastest.
    times[-1] *= 1.1
    assert fit(SIZES, times).alpha == pytest.approx(1e-5, rel=0.1)


def test_two_sizes_tell_no_error() -> None:
    with pytest.raises(ValueError, match="at least 3 different sizes, got 2"):
        fit([1024, 4096, 4096], [1e-5, 2e-5, 2e-5])


PROFILE = HardwareProfile(
    Host("some CPU", 2, 10**10, ("some GPU",), "Linux", "3.11.7", "2.13.0"),
    (Copy(2, 1024, 1e-6), Copy(2, 4096, 1.5e-6)),
    (
        Cost("shared memory", "all_reduce", "ring", 2, "float32", Fit(1e-5, 2e-10, 1e-6, 0.0, 0.25, 1024, 4096)),
        Cost("tcp", "all_gather", "direct", 2, "float32", Fit(0.0, 2e-9, 1e-6, 1e-10, 1.5, 1024, 4096)),
    ),
)


def test_a_profile_that_is_read_is_the_one_that_was_written(tmp_path: Path) -> None:
    write_profile(tmp_path / "here.json", PROFILE)
    assert read_profile(tmp_path / "here.json") == PROFILE
    empty = replace(PROFILE, copies=(), costs=())
    write_profile(tmp_path / "here.json", empty)
    assert read_profile(tmp_path / "here.json") == empty


def test_whole_numbers_stand_for_numbers(tmp_path: Path) -> None:
    data = written(tmp_path)
    data["copies"][0]["seconds"] = 1
    (tmp_path / "here.json").write_text(json.dumps(data))
    assert read_profile(tmp_path / "here.json").copies[0] == Copy(2, 1024, 1.0)


def written(folder: Path) -> dict[str, Any]:
    write_profile(folder / "here.json", PROFILE)
    data: dict[str, Any] = json.loads((folder / "here.json").read_text())
    return data


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("kind",), "recipe", r'expected a hardware profile \("kind"'),
        (("version",), 2, "version 1, got 2"),
        (("version",), None, "version 1, got None"),
        (("costs",), 5, r"Expected `array`, got `int` - at `\$.costs`"),
        (("costs", 1, "fit", "alpha"), "fast", r"Expected `float`, got `str` - at `\$.costs\[1\].fit.alpha`"),
        (("costs", 0, "fit", "beta"), -1e-9, r"Expected `float` >= 0.0 - at `\$.costs\[0\].fit.beta`"),
        (("costs", 0, "fit", "beta"), float("nan"), "in JSON"),
        (("costs", 0, "ranks"), True, r"Expected `int`, got `bool` - at `\$.costs\[0\].ranks`"),
        (("costs", 0, "ranks"), 2.5, r"Expected `int`, got `float` - at `\$.costs\[0\].ranks`"),
        (("costs", 0, "dtype"), None, r"Expected `str`, got `null` - at `\$.costs\[0\].dtype`"),
        (("costs", 0), {"ranks": 2}, r"Object missing required field `transport` - at `\$.costs\[0\]`"),
        (("copies", 1), [], r"Expected `object`, got `array` - at `\$.copies\[1\]`"),
        (("host", "gpus", 0), 7, r"Expected `str`, got `int` - at `\$.host.gpus\[0\]`"),
    ],
)
def test_a_file_that_is_no_profile_is_named_with_the_field_and_what_to_do(
    where: tuple[Any, ...], value: object, message: str, tmp_path: Path
) -> None:
    data = written(tmp_path)
    part = data
    for step in where[:-1]:
        part = part[step]
    part[where[-1]] = value
    path = tmp_path / "here.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=message) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "paceline bench comm --profile" in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("{", "in JSON"), ("[1]", '"kind"'), ("\x80", "in JSON")])
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "here.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        read_profile(tmp_path / "here.json")


def test_a_missing_file_and_a_folder_that_is_missing_are_mistakes_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no hardware profile could be read: No such file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(UserError, match="could not be written: No such file"):
        write_profile(tmp_path / "none" / "here.json", PROFILE)


def test_a_line_is_that_of_a_fit_and_two_sizes_are_enough() -> None:
    sizes, seconds = [100, 200, 400], [1.2, 2.1, 4.3]
    known = fit(sizes, seconds)
    assert straight_line(sizes, seconds) == (known.alpha, known.beta)
    assert straight_line([100, 300], [2.0, 4.0]) == (pytest.approx(1.0), pytest.approx(0.01))
    with pytest.raises(ValueError, match="at least 2 different sizes"):
        straight_line([100, 100], [2.0, 4.0])
