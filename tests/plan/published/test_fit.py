from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.models.config import ModelConfig
from paceline.plan.fitted import FITTED, PRIOR
from paceline.plan.published.describe import Described, Sample
from paceline.plan.published.fit import at, balanced, fit
from paceline.plan.published.predict import step_of
from paceline.plan.published.sets import PUBLISHED, samples
from paceline.plan.published.table import read
from paceline.plan.run import Run

FILES = Path(__file__).parents[3] / PUBLISHED


def described(width: int, context: int, gpu: str, devices: int, samples: int, stack: str = "composer") -> Described:
    config = ModelConfig(layers=24, width=width, heads=width // 128, context=context, vocabulary=50304)
    zero = 3 if stack == "composer" else 0
    tensor = 2 if stack == "megatron_deepspeed" else 1
    run = Run(config, devices, samples, 2, tensor=tensor, zero=zero, overlap=zero == 3)
    return Described(run, gpu, None, stack, None, None, None, ())


def rows() -> list[Described]:
    composer = [
        described(width, context, gpu, devices, samples)
        for width in (768, 2048, 5120)
        for context, samples in ((512, 32), (2048, 8), (32768, 1))
        for gpu in ("a100_80gb", "h100_80gb")
        for devices in (8, 128)
    ]
    megatron = [
        described(width, 1024, "a100_80gb", 8, samples, "megatron_deepspeed")
        for width in (1024, 2048)
        for samples in (1, 2, 4, 8, 16)
    ]
    return composer + megatron


@pytest.mark.full
def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    true = replace(PRIOR, matmul_passes=2.0, eager_passes=28.0, triton_a100=0.33, contention=0.5, launch=8e-5)
    found = fit([Sample(each, step_of(each, true).total) for each in rows()])
    assert found.held_out(range(len(found.samples))) == pytest.approx([0.0] * len(found.samples), abs=0.01)
    for name in ("matmul_passes", "eager_passes", "triton_a100", "contention", "launch"):
        assert getattr(found.constants, name) == pytest.approx(getattr(true, name), rel=0.12), name


@pytest.mark.full
def test_a_bad_run_moves_the_constants_little() -> None:
    truth = [Sample(each, step_of(each, PRIOR).total) for each in rows()]
    bad = [replace(truth[0], seconds=3 * truth[0].seconds), *truth[1:]]
    found = fit(bad, rounds=5)
    assert found.constants.matmul_efficiency == pytest.approx(PRIOR.matmul_efficiency, rel=0.02)
    assert abs(found.held_out(range(len(bad)))[0]) == pytest.approx(2 / 3, abs=0.03)


def test_sets_weigh_alike() -> None:
    sample = Sample(rows()[0], 1.0)
    weights = [each.weight for each in balanced([[sample] * 2, [sample] * 8])]
    assert weights == [1.0] * 2 + [0.25] * 8


@pytest.mark.skipif(not (FILES / "llm_foundry.csv").is_file(), reason="needs the published files beside the project")
def test_the_stored_constants_are_those_of_the_published_rows() -> None:
    # From there a step towards the fit to one of both files alone moves little of what that file tells of.
    moved = at(FITTED, samples(read(FILES / "llm_foundry.csv"))).without([])
    for name in ("matmul_efficiency", "triton_a100", "triton_h100", "contention"):
        assert getattr(moved, name) == pytest.approx(getattr(FITTED, name), rel=0.06), name


@pytest.mark.full
@pytest.mark.skipif(not (FILES / "llm_foundry.csv").is_file(), reason="needs the published files beside the project")
def test_one_step_forgets_a_fold_as_well_as_fitting_again() -> None:
    table = read(FILES / "llm_foundry.csv")
    every = samples(table)
    found = fit(every)
    large = [index for index, row in enumerate(table.rows) if row.text("model") in ("7b", "13b")]
    without = found.without(large)
    again = fit([sample for index, sample in enumerate(every) if index not in large]).constants
    for index in large:
        one, other = (step_of(every[index].described, constants).total for constants in (without, again))
        assert one == pytest.approx(other, rel=0.02)
