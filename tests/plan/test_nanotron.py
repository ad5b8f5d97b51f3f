from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.models.presets import PRESETS
from paceline.plan.nanotron import Nanotron

RUN = Nanotron(PRESETS["llama-8b"], samples=1, micro_batches=4, data=8, tensor=4)


def test_states_are_8_bytes_and_12_divided_among_data_parallel_ranks() -> None:
    assert RUN.states == pytest.approx(RUN.parameters * (8 + 12 / 8))
    assert replace(RUN, zero=0).states == pytest.approx(RUN.parameters * 20)
    assert replace(RUN, data=1).states == pytest.approx(RUN.parameters * 18), "one rank has no buckets"


def test_gradients_are_the_fullest_moment_where_activations_are_few() -> None:
    small = replace(RUN, config=replace(RUN.config, context=8))
    assert small.peak == small.states + 2 * small.parameters


def test_the_first_stage_has_as_many_in_flight_as_there_are_stages() -> None:
    stages = replace(RUN, pipeline=4, config=replace(RUN.config, vocabulary=1))
    assert stages.peak > replace(stages, micro_batches=1).peak
