from __future__ import annotations

import csv
import io
import json
import math
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.published.table import read
from paceline.plan.published.validate import check, to_dict

NUMBERS = ["1", "2", "8", "64", "512", "1,024", "0", "-1", "3.5", "1e9", "OOM", "", "-", "inf", "99999999999999999999"]
CELLS: dict[str, list[str]] = {
    "source": [
        "pytorch/torchtitan",
        "nanotron",
        "megatron 2021",
        "NeMo 24.07",
        "fms-fsdp",
        "llm-foundry",
        "",
        "vtrain",
    ],
    "table": ["H100 80GB FP8", "A100", "", "single"],
    "model": ["Llama 3.1 8B", "8b", "70B", "gpt3-175b", "1.34B", "mixtral 8x7b", "", "t5-11b", "Llama 3 8B LoRA", "1t"],
    "gpu": ["h100_80gb", "A100", "v100", "NVIDIA H200", "tpu-v5p", "", "h100 96GB", "mi300x"],
    "n_gpus": NUMBERS,
    "nodes": NUMBERS,
    "seq_len": [*NUMBERS, "8192", "8k"],
    "microbatch": NUMBERS,
    "grad_accum": NUMBERS,
    "global_batch": NUMBERS,
    "d_model": ["", "", "4096", "12288", "1000", "0"],
    "n_layers": ["", "", "32", "1", "0"],
    "n_heads": ["", "", "32", "7"],
    "tp": ["", "", "1", "8", "3", "yes"],
    "pp": ["", "", "1", "4", "64"],
    "cp": ["", "", "2"],
    "dp": ["", "", "8", "0"],
    "vp": ["", "2", "0"],
    "parallelism": ["", "FSDP 8, TP 8", "2D", "TP", "8-way TP", "HSDP", "dp=8 tp=4", "FSDP2 + async TP 2"],
    "zero_stage": ["", "0", "1", "3", "FULL_SHARD", "HYBRID_SHARD", "none"],
    "dp_shard": ["", "8", "full", "-1"],
    "dp_replicate": ["", "2"],
    "recompute": ["", "full", "none", "selective", "selective 2", "1/3", "0.5", "True", "op", "0/0", "3/0"],
    "precision": ["", "bf16", "fp8", "fp16", "fp32", "fp4", "amp_bf16"],
    "compile": ["", "yes", "no", "maybe"],
    "interconnect": ["", "RoCE 1600 Gb/s", "0 Gb/s", "InfiniBand"],
    "tokens_per_s_per_gpu": [*NUMBERS, "5,762"],
    "step_time_s": NUMBERS,
    "mfu": ["", "45", "0.45", "45%", "0"],
    "memory_gib": ["", "70", "OOM", "0"],
    "memory_pct": ["", "80"],
    "steady_alloc_bytes": ["", "", "1000000000"],
    "colour": ["red"],
}


WHOLE = {
    "source": "pytorch/torchtitan",
    "model": "Llama 3.1 8B",
    "gpu": "h100_80gb",
    "n_gpus": "64",
    "seq_len": "8192",
    "microbatch": "2",
    "tokens_per_s_per_gpu": "5,762",
}
"""A line from which nothing is missing."""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(sorted(CELLS)), max_size=6, unique=True), st.booleans(), st.data())
def test_whatever_is_in_a_line_it_is_predicted_or_listed_with_a_reason(
    changed: list[str], whole: bool, data: st.DataObject
) -> None:
    columns = list(dict.fromkeys([*(WHOLE if whole else ()), *changed])) or ["gpu"]
    cells = st.fixed_dictionaries(
        {name: st.sampled_from(CELLS[name]) if name in changed else st.just(WHOLE.get(name, "")) for name in columns}
    )
    rows = [tuple(row.values()) for row in data.draw(st.lists(cells, min_size=1, max_size=3))]
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_text(text.getvalue(), encoding="utf-8")
        if not any(any(row) for row in rows):
            return
        table = read(path)
        found = to_dict(check(table))
    told = {row["line"] for name in ("rows", "memory_rows", "not_predicted") for row in found[name]}
    assert told == {row.line for row in table.rows}
    assert found["unknown_columns"] == (["colour"] if "colour" in columns else [])
    assert all(each["reason"] for each in found["not_predicted"])
    assert all(math.isfinite(row["error"]) and row["predicted_seconds"] > 0 for row in found["rows"])
    json.dumps(found, allow_nan=False)
