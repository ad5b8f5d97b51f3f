"""Between GPUs, where all parameters whole may not fit, a run ends without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors import safe_open

from paceline.engine.full_parameters import FullParameters
from tests.engine.as_on_gpus import as_on_gpus
from tests.ranks import RankPool
from tests.train.processes import metrics, trained


@contextmanager
def without_whole_parameters() -> Iterator[None]:
    """Between GPUs; only rank 0's own state_dict may have all parameters whole, on the host."""
    full = FullParameters.full

    def refused(self: FullParameters, call: str, edits: bool = True, is_state: bool = False) -> Any:
        assert not edits and is_state and call == "model.state_dict()", call
        return full(self, call, edits, is_state)

    def left(*args: Any) -> None:
        raise AssertionError("the model is made whole on leaving")

    with (
        as_on_gpus(),
        patch.object(FullParameters, "full", refused),
        patch("paceline.engine.recovery.leave", left),
    ):
        yield


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_sharded_run_ends_with_weights_on_disk_and_no_rank_has_them_whole(
    ranks: RankPool, nano: list[str], tmp_path: Path, precision: str
) -> None:
    flags = (*nano, "--strategy.zero", "3", "--strategy.precision", precision, "--steps", "2", "--folder", "run")
    status, out, err = trained(ranks, 2, tmp_path, flags, without_whole_parameters)
    assert status == 0, err
    assert "paceline sample" in out and "a sample" not in out
    assert metrics(tmp_path / "run")
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
