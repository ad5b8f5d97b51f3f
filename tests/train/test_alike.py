from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from paceline.core.errors import UserError
from paceline.train.alike import require_alike, settings_of_all
from paceline.train.config import TrainConfig
from tests.ranks import RankPool


def _settled(configs: list[TrainConfig]) -> TrainConfig | str:
    try:
        return settings_of_all(configs[int(os.environ["RANK"])])
    except UserError as error:
        return str(error)


def _compared(values: list[dict[str, Any]]) -> str:
    try:
        require_alike(values[int(os.environ["RANK"])], "texts", "Let them be the same.")
    except UserError as error:
        return str(error)
    return ""


def test_ranks_of_other_settings_are_told_which(ranks: RankPool) -> None:
    config = TrainConfig()
    other = replace(config, seed=7, optim=replace(config.optim, lr=0.5), threads=3)
    expected = (
        "settings differ between ranks, so that each would train something else:\n"
        f"  optim.lr: {config.optim.lr} on rank 0, 0.5 on rank 1\n"
        f"  seed: {config.seed} on rank 0, 7 on rank 1\n"
        "Start the same command on every host."
    )
    assert ranks(2, _settled, [config, other]) == [expected, expected]


def test_a_host_may_have_threads_and_paths_of_its_own_and_goes_on_with_the_run_of_rank_0(ranks: RankPool) -> None:
    config = TrainConfig()
    first = replace(config, folder="here", resume="auto")
    other = replace(config, folder="there", threads=3, data=replace(config.data, path=("local",)))
    assert ranks(2, _settled, [first, other]) == [first, replace(other, folder="here", resume="auto")]


def test_what_one_rank_alone_has_is_named(ranks: RankPool) -> None:
    said = ranks(2, _compared, [{"tokens": 1}, {"tokens": 1, "more": 2}])
    assert "\n  more: None on rank 0, 2 on rank 1\nLet them be the same." in said[0] == said[1]
    assert ranks(2, _compared, [{"tokens": 1}] * 2) == ["", ""]
