"""What `pl.save` and `pl.load` are given beside the model: one or several of each, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from paceline.core.errors import UserError


class Stateful(Protocol):
    """What keeps a state of its own: a scheduler, a loader, a grad scaler."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Goes on from there."""
        ...


def as_sequence(given: Any) -> list[Any]:
    """One or several, as a list; None is none."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def in_words(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> str:
    """Optimizers and schedulers in words, which are compared over ranks."""
    found = [f"{type(one).__name__} of {_parameters(one)} parameters" for one in optimizers]
    found += [type(one).__name__ for one in schedulers]
    return f"with {', '.join(found)}" if found else "with weights alone"


def require(optimizers: Sequence[Any], schedulers: Sequence[Any], loader: Any) -> None:
    """Refuses what is something else.

    Raises:
        UserError: An optimizer is none of torch's, or a scheduler or loader has no state to keep.
    """
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise UserError(
                f"optimizer: expected one of torch.optim.Optimizer, or a list of some, got {type(one).__name__}"
            )
    for one in schedulers:
        if not _has_state(one):
            raise UserError(
                "scheduler: expected an object with state_dict and load_state_dict, or a list of some, "
                f"got {type(one).__name__}"
            )
    if loader is not None and not _has_state(loader):
        raise UserError(
            "loader: expected an object with state_dict and load_state_dict, such as torchdata's StatefulDataLoader, "
            f"got {type(loader).__name__}: leave it out, and skip what was seen when going on"
        )


def _has_state(one: Any) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


def _parameters(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in getattr(optimizer, "param_groups", ()))
