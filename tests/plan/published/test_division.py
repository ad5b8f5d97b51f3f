"""How rows say that a run was divided is what is predicted."""

from __future__ import annotations

from pathlib import Path

from paceline.plan.published.describe import describe
from tests.plan.published.test_describe import row


def test_torchtitan_s_pipelines_take_as_many_micro_batches_as_they_have_stages(tmp_path: Path) -> None:
    cells = {"source": "pytorch/torchtitan", "model": "Llama 3.1 405B", "n_gpus": 512, "gpu": "h100", "seq_len": 8192}
    cut = {**cells, "tp": 8, "pp": 8, "local_batch_size": 32, "global_batch": 256}
    run = describe(row(tmp_path, **cut)).run
    assert (run.samples, run.micro_batches) == (4, 8)
    assert describe(row(tmp_path, **{**cut, "local_batch_size": 4, "global_batch": 32})).run.micro_batches == 4
    assert describe(row(tmp_path, **cut, grad_accum=1)).run.micro_batches == 1
