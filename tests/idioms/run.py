"""Runs an idiom by two ranks and holds it against one process, or against DDP."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import traceback
import warnings
from functools import cache

import torch

import paceline as pl
from paceline.core.errors import EngineError
from tests import idioms
from tests.idioms.side import IDIOMS, Ddp, Found, Paceline, Side
from tests.ranks import RankError, RankPool

_NONE_OF_THEM = ("__main__", "run", "side", "test_idioms")
WRITTEN_IN = tuple(
    importlib.import_module(f"tests.idioms.{module.name}")
    for module in pkgutil.iter_modules(idioms.__path__)
    if module.name not in _NONE_OF_THEM
)
"""Importing them registers the idioms."""

_STAGES = {f"zero {zero}": pl.Strategy(zero=zero, bucket_mb=1e-4) for zero in range(4)}
PLACES: dict[str, tuple[pl.Strategy, int]] = {
    **{name: (strategy, 1) for name, strategy in _STAGES.items()},
    **{f"{name}, 2 micro-batches": (strategy, 2) for name, strategy in _STAGES.items()},
    **{
        f"{name}, low": (pl.Strategy(zero=zero, bucket_mb=1e-4, precision="bfloat16"), 1)
        for zero, name in enumerate(_STAGES)
    },
    **{
        f"{name}, shared parameters": (pl.Strategy(zero=zero, bucket_mb=1e-4, share_parameters=True), 1)
        for zero, name in enumerate(_STAGES)
        if zero
    },
    "zero 0, parameter server": (pl.SYSTEMS["parameter server"], 1),
    "zero 3, hold": (pl.Strategy(zero=3, bucket_mb=1e-4, accumulation="hold"), 2),
    "zero 3, defer": (pl.Strategy(zero=3, bucket_mb=1e-4, accumulation="defer"), 2),
}
"""Strategies, and how many micro-batches a step has."""
OF_ALL_RANKS = frozenset(
    {
        "a gradient is given other data",
        "a learned scale descends by hand",
        "a gradient is set to other memory",
        "an optimizer that asks for no missing gradient",
        "an optimizer that puts new data in place of the old",
        "clipping by torch",
        "clipping by torch after micro batches",
        "clipping by value",
        "dead neurons begin anew",
        "descent by hand",
        "gradients added up in a dictionary",
        "gradients averaged from a copy",
        "gradients are halved together after one was read",
        "gradients kept over a step are put back",
        "sharpness aware by hand",
        "a look at everything in inference mode",
        "actor and critic have a trunk",
        "the moments of each parameter are scaled",
        "views of gradients are kept and zeroed",
        "the norm of moments is noted",
    }
)
"""Take each rank to have gradients and states, which with a parameter server rank 0 has alone."""
LIMIT = 10.0


def on_rank(name: str, strategy: pl.Strategy | None, dtype: torch.dtype, micro: int) -> tuple[str, str, Found]:
    """(class of the error, message, result) of one rank; without a strategy, of DDP."""
    warnings.simplefilter("ignore")
    idiom = IDIOMS[name]
    if strategy is None:
        return "", "", idiom.run(Ddp(dtype, micro, unused=idiom.unused))
    side = Paceline(dtype, micro, strategy)
    try:
        found = idiom.run(side)
        for model in side.models:
            pl.release(model)
        return "", "", found
    except Exception as error:
        kind = "EngineError" if isinstance(error, EngineError) else type(error).__name__
        told = (kind, f"{error}\n{traceback.format_exc(limit=-6)}", {})
        with contextlib.suppress(Exception):
            pl.shutdown()
        return told


@cache
def alone(name: str, micro: int, low: bool) -> Found:
    """What one process ends with, in float64."""
    return IDIOMS[name].run(Side(torch.float64, micro))


_by_ddp: dict[tuple[str, int, torch.dtype], list[Found]] = {}
_low: dict[str, list[Found]] = {}


def expected(name: str, micro: int, pool: RankPool) -> list[Found]:
    """What each rank is to end with."""
    if IDIOMS[name].against == "one":
        return [alone(name, micro, False)] * 2
    key = (name, micro, torch.float64)
    if key not in _by_ddp:
        told = pool(2, on_rank, name, None, torch.float64, micro, timeout=LIMIT)
        _by_ddp[key] = [found for *_, found in told]
    return _by_ddp[key]


def is_for(name: str, place: str) -> bool:
    """Whether an idiom is run somewhere."""
    strategy, _ = PLACES[place]
    has_server = strategy.collective == "parameter_server"
    return (IDIOMS[name].low or not strategy.low) and not (has_server and name in OF_ALL_RANKS)


def place_names(place: str) -> set[str]:
    """What an idiom may name to say where it is refused."""
    strategy, _ = PLACES[place]
    return {
        f"zero {strategy.zero}",
        *(["low"] if strategy.low else []),
        *(["shared parameters"] if strategy.share_parameters else []),
        *(["parameter server"] if strategy.collective == "parameter_server" else []),
    }


def held(name: str, place: str, pool: RankPool) -> tuple[str, str]:
    """What became of an idiom somewhere, and why."""
    idiom, (strategy, micro) = IDIOMS[name], PLACES[place]
    low = strategy.low
    if not is_for(name, place):
        return "left out", ""
    try:
        wanted = expected(name, micro, pool)
    except Exception as error:
        return "INVALID", f"{type(error).__name__}: {error}"
    dtype = torch.float32 if low else torch.float64
    try:
        told = pool(2, on_rank, name, strategy, dtype, micro, timeout=LIMIT)
    except RankError as error:
        return "HUNG", str(error)[-2500:]
    words = idiom.refusal(place_names(place))
    if strategy.share_parameters and words is None:
        words = idiom.refusal({"zero 3"})
    errors = [(kind, message) for kind, message, _ in told if kind]
    if errors:
        ours = [message for kind, message in errors if kind in ("EngineError", "UserError", "DisagreementError")]
        if not ours:
            return "RAISED", "\n".join(f"{kind}: {message}" for kind, message in errors)
        if words is None or not re.search(words, ours[0]):
            return "REFUSED", ours[0]
        return "refused", ours[0]
    tolerance = idiom.off if low else 1e-9
    for rank, (_, _, found) in enumerate(told):
        if why := difference(wanted[rank], found, tolerance):
            return "WRONG", f"rank {rank}: {why}"
    if low and strategy.zero:
        if name not in _low:
            zero = pool(2, on_rank, name, PLACES["zero 0, low"][0], dtype, micro, timeout=LIMIT)
            _low[name] = [found for *_, found in zero]
        for rank, (_, _, found) in enumerate(told):
            if _low[name][rank] and (why := difference(_low[name][rank], found, 4e-3)):
                return "WRONG", f"rank {rank}, against zero 0: {why}"
    return "right", ""


def difference(wanted: Found, found: Found, tolerance: float) -> str:
    """The largest difference that is too large, in words."""
    if not wanted:
        return ""
    if wanted.keys() != found.keys():
        return f"{sorted(found)} and not {sorted(wanted)}"
    worst, where = 0.0, ""
    for name, value in wanted.items():
        if found[name].shape != value.shape:
            return f"{name} is of shape {list(found[name].shape)} and not {list(value.shape)}"
        if not value.numel():
            continue
        mine, theirs = found[name].double().cpu(), value.double().cpu()
        apart = ((mine - theirs).abs() / theirs.abs().clamp(min=1)).max().item()
        if not apart <= worst:
            worst, where = apart, name
            if worst != worst:
                break
    return f"{where} is off by {worst:.1e}" if not worst <= tolerance else ""
