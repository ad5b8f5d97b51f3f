"""Memory of a row's run, by the formulas of the program that it was measured with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.core.errors import UserError
from paceline.plan.fsdp2 import Fsdp2
from paceline.plan.llama_memory import Kept
from paceline.plan.nanotron import Nanotron
from paceline.plan.published import traced
from paceline.plan.published.describe import Described, describe, stack_of
from paceline.plan.published.megatron_memory import megatron_run
from paceline.plan.published.model_states import predicted_states, published_states, tells_states
from paceline.plan.published.predict import machines, profile
from paceline.plan.published.stacks import OWN
from paceline.plan.published.table import Row


@dataclass(frozen=True)
class MemoryPrediction:
    """A row's memory as measured and as predicted, in bytes of one rank; None where nothing was measured.

    Attributes:
        steady: Measured between steps; of a row that `tells_states`, these.
        steady_predicted: The same, predicted.
        peak: Measured at most within a step.
        peak_predicted: The same, predicted; of a row that `tells_states`, these.
        ran_out: Whether the run ran out of memory.
        available: What the device has.
    """

    steady: float | None
    steady_predicted: float | None
    peak: float | None
    peak_predicted: float
    ran_out: bool
    available: float | None

    @property
    def steady_error(self) -> float | None:
        """Predicted over measured, less 1."""
        if self.steady is None or self.steady_predicted is None:
            return None
        return self.steady_predicted / self.steady - 1

    @property
    def peak_error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.peak is None else self.peak_predicted / self.peak - 1


def measures_memory(row: Row) -> bool:
    """Whether a row tells of memory, or that it did not suffice."""
    return bool({"peak_bytes", "steady_bytes", "memory_share"} & row.values.keys()) or ran_out(row) or tells_states(row)


def ran_out(row: Row) -> bool:
    """Whether a row says that its run ran out of memory."""
    told = (*(row.text(name) for name in _TELL), *(row.text(name) for name in ("notes", "suspect", "label")))
    return any(re.search(r"\booms?\b|out of memory|out-of-memory", text) for text in told)


_TELL = ("peak_bytes", "seconds", "tokens_per_second", "tokens_per_second_device", "mfu", "model_flops")


def predict_memory(row: Row) -> MemoryPrediction:
    """Predicts a row's memory.

    Raises:
        UserError: It cannot be; the message is the reason.
    """
    if row.fault:
        raise UserError(row.fault)
    if tells_states(row):
        states = predicted_states(row)
        return MemoryPrediction(published_states(row), states, None, states, False, None)
    out = ran_out(row)
    stack = stack_of(row)
    if stack != OWN and ("steady_bytes" in row.values or stack == "megatron"):
        run = megatron_run(_options(row))
        peak = None if out else _above_zero(row, "peak_bytes")
        return MemoryPrediction(_above_zero(row, "steady_bytes"), run.steady, peak, run.peak, out, None)
    described = describe(row)
    available = profile(described.gpu, stack).device.memory
    peak = None if out else _above_zero(row, "peak_bytes")
    if peak is None and not out and (share := _above_zero(row, "memory_share")):
        peak = share * available
    if stack == OWN:
        steady, predicted = _of_paceline(described)
        return MemoryPrediction(_above_zero(row, "steady_bytes"), steady, peak, predicted, out, available)
    return MemoryPrediction(None, None, peak, _peak(described, row), out, available)


def _of_paceline(described: Described) -> tuple[float, float]:
    """What paceline holds between steps and at most: of a CPU's process, or of a GPU's allocator."""
    hardware = machines(described)
    held = traced.estimate(described.run, hardware).memory
    outside = 0 if hardware.is_cpu else held.framework
    return held.steady - outside, held.peak - outside


def _options(row: Row) -> dict[str, str]:
    """A row's cells by the names that Megatron-LM's functional tests give them, whatever the file calls them."""
    named = {option: row.values[name] for name, option in _OPTIONS.items() if name in row.values}
    return {**named, **row.raw}


_OPTIONS = {
    "devices": "n_gpus",
    "context": "seq_len",
    "samples": "microbatch",
    "layers": "n_layers",
    "width": "d_model",
    "heads": "n_heads",
    "kv_heads": "kv_groups",
    "positions": "max_pos",
    "vocabulary": "vocab_size",
    "layers_per_chunk": "layers_per_virtual_stage",
    "ff": "ffn",
    "position": "pos_emb",
    "table": "case",
    **{name: name for name in ("gpu", "tp", "pp", "cp", "global_batch", "dist_opt", "seq_parallel", "recompute")},
}


def _above_zero(row: Row, name: str) -> float | None:
    value = row.number(name)
    if value is not None and value <= 0:
        raise UserError(f"{name}: expected a number above 0, got {row.values[name]!r}")
    if value is not None and name.endswith("_bytes") and value < _LEAST:
        raise UserError(
            f"{name}: expected bytes, got {row.values[name]!r}; say the unit in the column's name, as in memory_gib"
        )
    return value


_LEAST = 1e6
"""Bytes: less is in another unit."""


def _peak(described: Described, row: Row) -> float:
    run = described.run
    kept: Kept = {"unit": "input", "operations": "operations"}.get(run.recompute, "all")  # type: ignore[assignment]
    if described.stack == "torchtitan":
        return Fsdp2(
            config=run.config,
            samples=run.samples * (run.micro_batches if run.pipeline > 1 else 1),
            shards=run.shards,
            tensor=run.tensor,
            pipeline=run.pipeline,
            context_ranks=run.context_ranks,
            kept=kept,
            recomputed=run.recompute_share,
            compiled=bool(described.compiled),
            compiled_loss=described.compiled_loss,
            micro_batches=run.micro_batches if run.pipeline > 1 else 1,
        ).reserved
    if described.stack == "nanotron":
        return Nanotron(
            config=run.config,
            samples=run.samples,
            micro_batches=run.micro_batches,
            data=run.data,
            zero=min(run.zero, 1),
            tensor=run.tensor,
            pipeline=run.pipeline,
            context_ranks=run.context_ranks,
            kept="input" if run.recompute == "unit" else "all",
        ).peak
    raise UserError(
        "only memory of Megatron-LM, torchtitan and nanotron is predicted: what other programs hold is not known"
    )
