from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.plan.cli import main
from paceline.plan.published.accuracy import TRACED, evaluate, traced_lines
from paceline.plan.published.accuracy_page import page
from paceline.plan.published.sets import PUBLISHED
from paceline.plan.published.table import read
from paceline.plan.published.validate import check

FILES = Path(__file__).parents[3] / PUBLISHED

ROWS = """source,model,n_gpus,gpu,seq_len,local_batch_size,tp,tokens_per_s_per_gpu,memory_gib,colour
torchtitan,Llama 3.1 8B,8,h100,8192,1,1,5000,60,red
torchtitan,Llama 3.1 70B,256,h100,8192,16,8,800,,red
torchtitan,Llama 3.1 70B,8,h100,8192,8,1,OOM,OOM,red
mine,unheard of,8,h100,8192,1,1,5000,,red
mine,Llama 3.1 8B,8,h100,8192,1,1,,,red
mine,Llama 3.1 8B,8
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS, encoding="utf-8")
    return str(path)


def test_every_line_is_predicted_or_listed(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--validate", file, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = {row["line"] for row in found["rows"]} | {row["line"] for row in found["not_predicted"]}
    assert told == {2, 3, 4, 5, 6, 7}
    assert found["unknown_columns"] == ["colour"]
    assert [row["line"] for row in found["rows"]] == [2, 3]
    assert [row["by_formula"] for row in found["rows"]] == [False, True]
    assert found["step_time"]["rows"] == 2
    # It ran out of memory on 8 devices, and no forecast says that it fits.
    assert found["memory_rows"][-1]["ran_out"] and found["wrongly_fits"] == []
    reasons = {row["line"]: row["reason"] for row in found["not_predicted"]}
    assert "'OOM'" in reasons[4] and "not known" in reasons[5]
    assert "neither how long" in reasons[6] and "expected 10 cells" in reasons[7]


def test_the_same_in_words(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--validate", file])
    printed = capsys.readouterr().out
    assert "Columns that are not known, and play no part: colour" in printed
    assert "Not predicted: 4" in printed and "step time: mean" in printed and "ran out" in printed


def test_what_a_row_leaves_out_is_told_beside_its_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.csv"
    path.write_text("model,n_gpus,gpu,seq_len,micro_batch,mfu_pct\nllama-8b,8,h100,8192,1,0.4\n", encoding="utf-8")
    assert main(["--validate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{path}: 1 row\n" in printed
    told = "one micro-batch a step, bfloat16, not compiled, nothing recomputed, sharded as by FSDP"
    assert f"{told}, mfu_pct 0.4 as a share, not percent" in printed


def test_a_file_of_which_no_row_can_be_compared_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("model,n_gpus,gpu\nunheard of,8,h100\n", encoding="utf-8")
    assert main(["--validate", str(path)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--validate", "/nowhere.csv"], "found no file"),
        (["--validate", "--published", "/nowhere"], "expected a folder with llm_foundry.csv"),
        (["--validate", "rows.csv", "--published", "x"], "leave it out"),
        (["--validate", "--devices", "8"], "--devices: --validate takes measurements alone"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(arguments)


@pytest.mark.full
@pytest.mark.skipif(not (FILES / "llm_foundry.csv").is_file(), reason="needs the published files beside the project")
def test_the_page_is_what_the_published_files_give_and_its_targets_are_met() -> None:
    result = evaluate(str(FILES), traces=False)
    committed = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    told = page(result)
    for title in ("## LLM-Foundry", "## vTrain", "## The constants"):
        (section,) = (part for part in told.split("\n\n## ") if f"## {part}".startswith(title))
        assert section in committed
    targets = [line for line in told.splitlines() if line.endswith(("| met |", "| missed |"))]
    assert len(targets) == 9 and all(line in committed for line in targets)
    # Nobody published a run of these that ran out of memory.
    assert "| runs that ran out of memory said to fit | 0 | 0 of 0 | no such row is published |" in committed
    # A forecast of every pair in order would have to know the noise of each run.
    assert all("order" in line for line in targets if "missed" in line)
    (fold,) = (
        each.errors
        for each in result.times["llm_foundry.csv"]
        if each.rows == "all" and each.constants == "all rows but this size of model's"
    )
    assert fold.median <= 0.04 and fold.mean <= 0.06 and fold.p90 <= 0.12
    single, multi = (
        each.errors.mean
        for each in result.times["vtrain_a100.csv"]
        if each.constants == "all rows but this width of model's"
    )
    assert single < 0.0837 and multi < 0.10


@pytest.mark.full
@pytest.mark.skipif(not (FILES / TRACED).is_file(), reason="needs the published files beside the project")
def test_traces_forecast_published_runs_about_as_well_as_formulas() -> None:
    whole = check(read(FILES / TRACED))
    # Few shapes, as each is traced; all of them are in the page.
    few = replace(whole, times=tuple(each for each in whole.times if each[1].described.run.config.context == 2048)[::6])
    lines, unfit = traced_lines(few)
    assert (
        sum(line.errors.rows for line in lines if line.rows != "all") == 2 * len(few.times)
        and unfit < len(few.times) / 2
    )
    # Recomputing as torch does now spares a twelfth of a step, which these runs did not.
    for traced, formulas, more in zip(lines[::2], lines[1::2], (0.03, 0.03 + 1 / 12, 0.03 + 1 / 12), strict=True):
        assert traced.rows == formulas.rows
        assert traced.errors.mean < formulas.errors.mean + more
