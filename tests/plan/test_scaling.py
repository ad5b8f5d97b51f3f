from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.case import Case
from paceline.plan.scaling import cells, curve, draw, in_words, takes_over, to_dict
from paceline.plan.search import search
from paceline.plan.subject import transformer
from paceline.plan.what_if import changes, with_network

SMALL = transformer("gpt2-124m", PRESETS["gpt2-124m"])
CASE = Case(SMALL, profiles.hardware("a100"), 64)


def test_with_the_same_batch_communication_takes_over_and_with_more_samples_it_weighs_less(tmp_path: Path) -> None:
    slow = replace(CASE, hardware=with_network(CASE.hardware, 0.04))
    points = list(curve(slow, 8, "bfloat16", (1, 8, 512)))
    assert takes_over(points, strong=True) == 512
    assert "takes over (it costs more than computing does) at 512 devices" in in_words(points)
    shares = [p.strong.network / p.strong.seconds for p in points]
    assert shares == sorted(shares) and shares[0] == 0 and shares[1] < 0.2 and shares[2] > 0.5
    assert points[2].weak.network / points[2].weak.seconds < shares[2]
    assert points[2].weak.tokens == 8 * points[2].strong.tokens == 8 * 512 * 1024
    assert to_dict(points)["communication_takes_over"]["strong"] == 512
    assert [len(cells(point)) for point in points] == [11] * 3
    pytest.importorskip("matplotlib")
    draw(points, "a title", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_at_the_devices_that_are_planned_it_is_the_plans_own_best() -> None:
    case = replace(CASE, devices=256)
    (point,) = curve(case, 8, "bfloat16", (256,))
    assert point.strong == point.weak == search(case, 8).recommended


@pytest.mark.full
def test_a_hundred_thousand_devices_take_no_longer_to_plan_than_a_hundred() -> None:
    def took(devices: int) -> float:
        before = time.process_time()
        (point,) = curve(replace(CASE, devices=devices), 8, "bfloat16", (devices,))
        assert point.weak is not None
        return time.process_time() - before

    took(128)
    assert took(100_000) < 10 * took(128)


def test_where_samples_are_fewer_than_devices_there_is_no_such_batch() -> None:
    (point,) = curve(CASE, 1, "bfloat16", (128,))
    assert point.strong is None and point.weak is not None


@pytest.mark.full
def test_what_ifs_are_what_was_found_with_the_change_made() -> None:
    found = search(CASE, 8)
    told = {change.what: change for change in changes(CASE, 8, found)}
    assert list(told) == [
        "half the network between hosts",
        "twice the network between hosts",
        "128 devices, same batch",
        "one rank 1.2 times as slow",
    ]
    best = found.recommended.seconds
    half, twice = (told[f"{word} the network between hosts"] for word in ("half", "twice"))
    assert half.same.seconds >= best >= twice.same.seconds and half.best.seconds <= half.same.seconds
    assert best / 2 <= told["128 devices, same batch"].best.seconds < best
    slow = told["one rank 1.2 times as slow"].best
    assert slow.seconds == pytest.approx(best + slow.bubble - found.recommended.bubble)
    assert slow.seconds > best
    assert [change.what for change in changes(replace(CASE, devices=1), 3, search(replace(CASE, devices=1), 3))] == [
        "2 devices, twice the batch"
    ]
