from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.plan.published.memory import measures_memory, predict_memory
from paceline.plan.published.table import Row, read

HEADER = "source,model_params,dp_degree,stage,offload,formula,unit,published,formula_value\n"
PAPER = '"Rajbhandari et al. 2020 (ZeRO), Table 1",7500000000,{},,x,GB (1e9),{},'
SPEED = "deepspeedai/DeepSpeed:memory.rst,2851000000,8,{},x,GiB per GPU,{},"


def row(tmp_path: Path, line: str) -> Row:
    path = tmp_path / "states.csv"
    path.write_text(HEADER + line + "\n", encoding="utf-8")
    table = read(path)
    assert not table.unknown
    assert measures_memory(table.rows[0])
    return table.rows[0]


@pytest.mark.parametrize(
    ("line", "gigabytes"),
    [
        (PAPER.format("1,1", 120), 120.0),
        (PAPER.format("64,1", 31.4), 4 * 7.5 + 12 * 7.5 / 64),
        (PAPER.format("64,2", 16.6), 2 * 7.5 + 14 * 7.5 / 64),
        (PAPER.format("64,3", 1.88), 16 * 7.5 / 64),
        (SPEED.format("2,offload_optimizer=cpu", 5.31), 2 * 2.851),
        (SPEED.format("2,offload_optimizer=none", 15.93), (2 + 18 / 8) * 2.851),
        (SPEED.format("2,none", "").removesuffix(",") + ",11.285", (2 + 18 / 8) * 2.851),
    ],
)
def test_states_are_those_of_the_formula(tmp_path: Path, line: str, gigabytes: float) -> None:
    found = predict_memory(row(tmp_path, line))
    assert found.steady_predicted == pytest.approx(gigabytes * 1e9)
    # All but the one that DeepSpeed's page prints as its code does not compute it.
    assert found.steady_error == pytest.approx(0, abs=0.005) or "15.93" in line


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (SPEED.format('3,"offload_param=cpu , offload_optimizer=cpu"', 0.12), "largest layer"),
        (SPEED.format("1,none", 1), "estimates 2 and 3"),
        (PAPER.format("64,", 31.4), "stage: expected 0, 1, 2 or 3, got 'none'"),
        (PAPER.format(",1", 31.4), "expected model_params and dp_degree"),
        (PAPER.format("64,1", ""), "got a formula alone"),
        (PAPER.format("64,1", 0), "above 0"),
        (PAPER.format("64,1", 31.4).replace("GB (1e9)", "furlongs"), "unit: expected one of gb"),
    ],
)
def test_what_a_row_lacks_is_told(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        predict_memory(row(tmp_path, line))
