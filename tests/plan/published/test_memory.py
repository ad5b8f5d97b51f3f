from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.plan.published.memory import predict_memory
from paceline.plan.published.table import Row, read


def row(tmp_path: Path, column: str) -> Row:
    path = tmp_path / "run.csv"
    text = f"source,model,gpu,n_gpus,local_bs,unit,published,{column}\ntorchtitan,8b,h100,8,1,s,2024,60\n"
    path.write_text(text, encoding="utf-8")
    return read(path).rows[0]


def test_a_run_s_memory_is_what_a_column_of_memory_tells_whatever_else_is_in_the_row(tmp_path: Path) -> None:
    assert predict_memory(row(tmp_path, "memory_gib")).peak == 60 * 2**30


def test_memory_in_no_unit_is_not_taken_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="peak_bytes: expected bytes, got '60'; say the unit in the column's name"):
        predict_memory(row(tmp_path, "peak_memory"))
