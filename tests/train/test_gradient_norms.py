"""Norms of gradients that a run writes down on request."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.train.gradient_norms import norm_lines
from paceline.train.sections import LogConfig
from tests.ranks import RankPool
from tests.train.processes import metrics, trained


@pytest.mark.full
@pytest.mark.parametrize("zero", ["0", "1", "2", "3"])
def test_they_are_of_the_steps_whose_events_are_written(
    ranks: RankPool, nano: list[str], tmp_path: Path, zero: str
) -> None:
    flags = ["--steps", "10", "--log.every", "2", "--log.events-every", "4", "--log.gradient-norms", "--folder", "run"]
    status, _, errors = trained(ranks, 2, tmp_path, [*nano, *flags, "--strategy.zero", zero])
    assert (status, errors) == (0, "")
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "gradient_norms.jsonl").read_text().splitlines()]
    events = [json.loads(line)["step"] + 1 for line in (run / "events.jsonl").read_text().splitlines()]
    assert sorted({line["step"] for line in lines}) == sorted(set(events)) == [4, 8, 10]
    told = {line["step"]: line["train/grad_norm"] for line in metrics(run) if "train/grad_norm" in line}
    per_token = set()
    for step in (4, 8, 10):
        of_step = [line for line in lines if line["step"] == step]
        assert len({line["parameter"] for line in of_step}) == len(of_step) > 10
        whole = math.hypot(*(line["whole"] for line in of_step))
        # The trainer divides by the step's tokens, of which all full batches have as many.
        per_token.add(round(whole / told[step]))
        for line in of_step:
            assert all(len(local) == 2 for local in line["local"]) and len(line["reduced"]) == 2
            assert 0 < line["whole"] <= sum(map(sum, line["local"])) * 1.0001
            if zero == "0":
                assert line["reduced"] == [line["whole"]] * 2
    assert len(per_token) == 1 and per_token.pop() == 8 * 64


def test_they_are_not_written_unless_asked_for(ranks: RankPool, nano: list[str], tmp_path: Path) -> None:
    status, _, errors = trained(ranks, 2, tmp_path, [*nano, "--steps", "2", "--folder", "run"])
    assert (status, errors) == (0, "") and not (tmp_path / "run" / "gradient_norms.jsonl").exists()


def test_without_events_they_are_refused() -> None:
    with pytest.raises(UserError, match=r"log\.gradient_norms: .* log\.events_every is 0"):
        LogConfig(gradient_norms=True, events_every=0)


def test_shards_are_put_together_and_what_is_not_finite_is_said() -> None:
    rows = [
        {"local": [[1.0, None, math.inf]], "reduced": [3.0, None, math.nan]},
        {"local": [[2.0, None, 1.0]], "reduced": [4.0, None, None]},
    ]
    first, second = norm_lines(7, rows, ["a", "b", "c"], copies=1)
    assert first == {"step": 7, "parameter": "a", "local": [[1.0, 2.0]], "reduced": [3.0, 4.0], "whole": 5.0}
    assert second == {"step": 7, "parameter": "c", "local": [["inf", 1.0]], "reduced": ["nan", None], "whole": "nan"}
    assert norm_lines(7, [*rows, None], ["a", "b", "c"], copies=1) == []


def test_products_of_ranks_gradients_agree_with_their_norms(ranks: RankPool, nano: list[str], tmp_path: Path) -> None:
    flags = ["--steps", "4", "--log.every", "2", "--log.events-every", "2", "--log.gradient-norms", "--folder", "run"]
    status, _, errors = trained(ranks, 2, tmp_path, [*nano, *flags])
    assert (status, errors) == (0, "")
    lines = [json.loads(line) for line in (tmp_path / "run" / "chunk_products.jsonl").read_text().splitlines()]
    norms = [json.loads(line) for line in (tmp_path / "run" / "gradient_norms.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {line["step"] for line in norms} == {2, 4}
    for step in (2, 4):
        chunks = [chunk for line in lines if line["step"] == step for chunk in line["products"]]
        of_step = [line for line in norms if line["step"] == step]
        first, both, second = (sum(chunk[i] for chunk in chunks) for i in range(3))
        local = [sum(line["local"][-1][rank] ** 2 for line in of_step) for rank in range(2)]
        assert [first, second] == pytest.approx(local, rel=1e-5)
        whole = sum(line["whole"] ** 2 for line in of_step)
        assert first + 2 * both + second == pytest.approx(whole, rel=1e-5)
