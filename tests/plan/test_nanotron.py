from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.models.presets import PRESETS, llama
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


def test_the_first_stage_has_blocks_for_what_the_last_ones_output_layer_multiplies() -> None:
    # The Ultra-Scale Playbook's 3.57 billion: a block of 113 million multiplications, an output layer of 403 million.
    config = llama(28, 3072, 24, 24, 8192, 4096, 131_072, True, rope_theta=10_000.0)
    stages = Nanotron(config, samples=1, micro_batches=8, data=8, pipeline=2)
    assert stages.first_blocks == 16
    assert replace(stages, pipeline=1).first_blocks == 28
    assert replace(stages, config=replace(config, vocabulary=8)).first_blocks == 15
    block = 4 * 3072 * 3072 + 3 * 3072 * 8192 + 2 * 3072
    assert stages.parameters == 16 * block + 131_072 * 3072
