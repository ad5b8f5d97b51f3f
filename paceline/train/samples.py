"""Which samples each step had, written down on request."""

from __future__ import annotations

from paceline.data.loader import Loader
from paceline.train.outputs import Outputs
from paceline.train.run_folder import SAMPLES


def write_samples(outputs: Outputs, loader: Loader, step: int) -> None:
    """Adds a line to samples.jsonl: "step", from 1, and "samples", by rank, numbered as in skipped.jsonl.

    Rank 0 knows all ranks' samples, and each rank compares its own with what it was given.

    Args:
        outputs: Where to.
        loader: Has given the step's samples last.
        step: Its number, from 1.

    Raises:
        RuntimeError: This rank was given others.
    """
    shares, rank = loader.shares(step - 1), outputs.world.rank
    if shares[rank] != loader.given:
        raise RuntimeError(f"rank {rank} was given samples {loader.given} in step {step}, which has {shares[rank]}")
    if outputs.folder is not None:
        by_rank = [[number for part in parts for number in part] for parts in shares]
        outputs.folder.append(SAMPLES, [{"step": step, "samples": by_rank}])
