from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.plan.published.describe import describe
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


def test_torchtitan_s_loss_is_compiled_from_2025_on(tmp_path: Path) -> None:
    def peak(source: str) -> float:
        path = tmp_path / "run.csv"
        path.write_text(
            "source,model,gpu,n_gpus,local_bs,seq_len,compile,memory_gib\n"
            f"pytorch/torchtitan@20481f:{source},Llama 3.1 8B,h100,8,2,8192,yes,77\n",
            encoding="utf-8",
        )
        return predict_memory(read(path).rows[0]).peak_predicted

    told = "its loss compiled, as in torchtitan since 2025"
    later = peak("benchmarks/llama3_8b_h200_2025-06_torchtitan.md")
    assert told in describe(read(tmp_path / "run.csv").rows[0]).assumed
    for source in ("benchmarks/llama3_h100_202412_torchtitan.md", "docs/performance.md"):
        # Ten bytes more of each logit.
        assert peak(source) - later == pytest.approx(10 * 2 * 8192 * 128256, rel=0.01)
        assert told not in describe(read(tmp_path / "run.csv").rows[0]).assumed


def test_ranks_that_share_a_sequence_share_states_too(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text(
        "source,model,gpu,n_gpus,local_bs,seq_len,cp,memory_gib\n"
        "torchtitan,Llama 3.1 8B,h100,8,1,32768,1,84\ntorchtitan,Llama 3.1 8B,h100,8,1,262144,8,84\n",
        encoding="utf-8",
    )
    one, eight = (predict_memory(row).peak_predicted for row in read(path).rows)
    assert eight == pytest.approx(one)
