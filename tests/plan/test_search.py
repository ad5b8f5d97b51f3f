from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from paceline.core.strategy import Strategy
from paceline.models.on_meta import on_meta
from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.case import Case
from paceline.plan.estimate import Setting
from paceline.plan.least import Least
from paceline.plan.recommend import in_words, reason, would_fit
from paceline.plan.search import _settings, families, fits, groups, micro_batches, search
from paceline.plan.subject import of_module, transformer

SMALL = transformer("small", PRESETS["small"])
LLAMA = transformer("llama-8b", PRESETS["llama-8b"])
H100 = profiles.hardware("h100")


@pytest.mark.full
def test_what_is_found_is_the_best_of_all_when_all_are_simulated() -> None:
    tight = replace(H100, device=replace(H100.device, memory=int(2.2 * 2**30)))
    case = Case(SMALL, tight, 16)
    found = search(case, 16)
    by_family = {}
    for family in families(case, "bfloat16"):
        every = [case.estimate(setting) for setting in _settings(case, Least(case), family, 16)]
        fitting = [each for each in every if each.fits]
        by_family[family.stage, family.shard] = min(each.seconds for each in fitting) if fitting else None
    assert any(each is None for each in by_family.values()) or len(by_family) > 4
    for each in found.best:
        best = by_family[each.setting.strategy.stage, each.setting.strategy.shard]
        assert (best is not None) == each.fits
        if best is not None:
            assert each.seconds <= 1.001 * best
    assert found.simulated < found.looked_at / 3


def test_the_fastest_that_fit_come_first_and_then_what_misses_by_least() -> None:
    found = search(Case(LLAMA, H100, 64), 8)
    fit = [each.fits for each in found.best]
    assert fit == sorted(fit, reverse=True) and fit[0] and not fit[-1]
    times = [each.seconds for each in found.best if each.fits]
    assert times[1:] == sorted(times[1:]) and times[0] <= times[1]
    assert all(each.memory.peak <= each.capacity for each in found.best if each.fits)
    assert "zero 0 would need" in reason(found)
    assert in_words(found.best[0]).startswith(found.best[0].name)


def test_where_all_fits_nothing_is_recomputed_and_stages_differ_by_little() -> None:
    found = search(Case(transformer("gpt2-124m", PRESETS["gpt2-124m"]), H100, 8), 64)
    assert all(each.fits and each.setting.strategy.recompute == "none" for each in found.best)
    assert [each.setting.strategy.stage for each in sorted(found.best, key=lambda each: each.name)] == [0, 1, 2, 3]
    assert max(each.seconds for each in found.best) < 1.05 * min(each.seconds for each in found.best)


def test_what_would_not_have_to_be_computed_again_is_not_said_to_be() -> None:
    """A layer that keeps nothing but its input takes as long either way."""
    model = on_meta(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]))
    case = Case(of_module("layers", model, torch.zeros(4, 64)), H100, 4)
    for best in search(case, 16).best:
        assert best.setting.strategy.recompute == "none"


def test_nothing_fits_and_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(LLAMA, H100, 2)
    found = search(case, 1)
    assert found.recommended is None and reason(found) == ""
    assert found.best[0].setting.strategy == Strategy(zero=3, precision="bfloat16", recompute="unit")
    monkeypatch.setattr(Case, "estimate", lambda *_: pytest.fail("what would fit needs no simulation"))
    changes = would_fit(case, 1, "bfloat16")
    monkeypatch.undo()
    assert changes[0] == "4 devices and a step of 4 samples" and changes[1].startswith("--hardware ")
    assert search(replace(case, devices=4), 1).recommended is not None
    larger = profiles.hardware(changes[1].removeprefix("--hardware "))
    assert search(replace(case, hardware=larger), 1).recommended is not None


def test_a_strategy_fits_where_a_search_finds_a_setting_of_it() -> None:
    for gib, devices in ((2, 16), (2.2, 16), (3, 2), (1, 1), (1.4, 64)):
        case = Case(SMALL, replace(H100, device=replace(H100.device, memory=int(gib * 2**30))), devices)
        for family in families(case, "bfloat16"):
            found = search(case, 16, strategies=[replace(family, shard=0)])
            assert fits(case, replace(family, shard=0), 16) == (found.recommended is not None)


def test_one_device_has_one_strategy() -> None:
    found = search(Case(SMALL, H100, 1), 4, precisions=("bfloat16", "float32"))
    assert [(each.setting.strategy.stage, each.setting.strategy.precision) for each in found.best] == [
        (0, "bfloat16"),
        (0, "float32"),
    ]


@pytest.mark.parametrize(
    ("hardware", "devices", "sizes"),
    [
        ("h100", 8, []),
        ("h100", 6, []),
        ("h100", 64, [8, 16, 32]),
        ("h100", 12, [4]),
        ("h100", 11, []),
        ("gb200", 8192, [8]),
        ("gb200", 144, [72]),
        ("gh200", 64, [2, 4, 16]),
    ],
)
def test_groups_fill_hosts_or_divide_them(hardware: str, devices: int, sizes: list[int]) -> None:
    case = Case(SMALL, profiles.hardware(hardware), devices)
    assert sorted({each.shard for each in families(case, "bfloat16")} - {0}) == sizes


@pytest.mark.full
def test_where_hosts_are_not_full_groups_within_them_save_rings_through_all_ranks() -> None:
    found = search(Case(transformer("llama-1b", PRESETS["llama-1b"], 512), profiles.hardware("gb200"), 8192), 1)
    fitting = {each.name: each.seconds for each in found.best if each.fits}
    assert fitting["zero 3, groups of 8"] < 0.5 * fitting["zero 3"]


@pytest.mark.parametrize(
    ("samples", "fits", "sizes"),
    [
        (1, 1, [1]),
        (12, 12, [1, 2, 3, 4, 6, 12]),
        (7, 7, [1, 7]),
        (7, 6, [1]),
        (7, 0, [1]),
        (1024, 1024, [1, 2, 8, 16, 64, 128, 512, 1024]),
        (1024, 100, [1, 2, 4, 8, 16, 32, 64]),
        (120, 60, [1, 3, 5, 8, 12, 20, 30, 60]),
    ],
)
def test_sizes_of_micro_batches_divide_a_devices_samples_up_to_the_largest_that_fits(
    samples: int, fits: int, sizes: list[int]
) -> None:
    assert micro_batches(samples, lambda size: size <= fits) == sizes


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (2, [2]), (7, [7]), (12, [2, 3, 4, 6, 12])])
def test_micro_batches_are_no_smaller_than_the_model_takes(samples: int, sizes: list[int]) -> None:
    assert micro_batches(samples, lambda size: size <= samples, least=2) == sizes


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "hardware", "samples"), [("nano", "h100", 1000), ("tiny", "a100", 120), ("gpt2-124m", "h100", 120)]
)
def test_no_micro_batch_of_another_size_is_much_faster(model: str, hardware: str, samples: int) -> None:
    case = Case(transformer(model, PRESETS[model], 128), profiles.hardware(hardware), 8)
    found = search(case, samples).recommended
    assert found is not None
    every = [
        case.estimate(Setting(replace(found.setting.strategy, recompute=recompute), size, samples // size))
        for size in range(1, samples + 1)
        if samples % size == 0
        for recompute in ("none", "unit")
    ]
    assert found.seconds < 1.03 * min(each.seconds for each in every if each.fits)


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [(1024, [8, 16, 32, 128, 512]), (256, [8, 16, 32, 128]), (1000, [8, 40, 200]), (8, []), (100, [4]), (1021, [])],
)
def test_groups_are_of_whole_hosts_and_divide_the_devices(devices: int, sizes: list[int]) -> None:
    subject = transformer("nano", PRESETS["nano"])
    assert groups(Case(subject, profiles.hardware("h100"), devices), (1, 2, 4, 16, 64)) == sizes
