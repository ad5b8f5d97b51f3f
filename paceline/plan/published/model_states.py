"""Model states of tables that tell nothing else: ZeRO's own, and what DeepSpeed's estimators print. Pure."""

from __future__ import annotations

from paceline.core.errors import UserError
from paceline.plan.published.table import Row

_OF_RUNS = {"peak_bytes", "steady_bytes", "memory_share", "gpu"}
_SIZES = {"gb": 1e9, "gib": 2.0**30, "mb": 1e6, "mib": 2.0**20, "bytes": 1.0}


def tells_states(row: Row) -> bool:
    """Whether a row has parameters, gradients and optimizer states alone, as a figure or as a formula of them."""
    return bool({"states", "formula"} & row.values.keys()) and "unit" in row.values and not _OF_RUNS & row.values.keys()


def published_states(row: Row) -> float:
    """Bytes of a rank that a row tells.

    Raises:
        UserError: It has no figure, or one in a unit that is not known.
    """
    value = row.number("states")
    if value is None:
        raise UserError("published: expected a figure, got a formula alone")
    if value <= 0:
        raise UserError(f"published: expected a number above 0, got {row.values['states']!r}")
    unit = row.text("unit").split(" ")[0]
    if unit not in _SIZES:
        raise UserError(f"unit: expected one of {', '.join(_SIZES)}, got {row.values.get('unit', 'none')!r}")
    return value * _SIZES[unit]


def predicted_states(row: Row) -> float:
    """Bytes of them by formula: mixed precision and Adam, K = 12 (Rajbhandari et al. 2020), or DeepSpeed's own.

    Raises:
        UserError: The row lacks what the formula needs.
    """
    parameters, ranks, stage = row.number("n_params"), row.whole("dp"), row.text("sharding")
    if not parameters or ranks is None:
        raise UserError("expected model_params and dp_degree, of which model states are made, got no number in one")
    if stage not in ("0", "1", "2", "3"):
        raise UserError(f"stage: expected 0, 1, 2 or 3, got {row.values.get('sharding', 'none')!r}")
    if "deepspeed" in row.text("source"):
        return _deepspeed(row, parameters, ranks, int(stage))
    parts = ((2, 3), (2, 2), (12, 1))
    return sum(size * parameters / (ranks if int(stage) >= shared else 1) for size, shared in parts)


def _deepspeed(row: Row, parameters: float, ranks: int, stage: int) -> float:
    """As its estimators count (runtime/zero/stage_1_and_2.py, stage3.py): gradients in 16 and in 32 bits."""
    if stage == 2:
        offloads = row.text("offload").replace(" ", "") not in ("", "none", "offload_optimizer=none")
        return 2 * parameters + (0.0 if offloads else 18 * parameters / ranks)
    if stage == 3:
        raise UserError("DeepSpeed counts the largest layer at stage 3, whose parameters are in no column")
    raise UserError(f"stage: DeepSpeed estimates 2 and 3, got {stage}")
