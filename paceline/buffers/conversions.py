"""Parameters that a loop makes of another dtype, as `model.half()` does, once they are laid out."""

from __future__ import annotations

from typing import NoReturn

import torch

from paceline.buffers.edits import refuse_edit
from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.memory import bits_of
from paceline.core.errors import EngineError


class Conversions:
    """Tells which trained parameters were converted, whose gradients would be reduced in another dtype than theirs."""

    def __init__(self, flat: FlatParameters) -> None:
        """Takes the dtypes that parameters have now for those that they are computed with in."""
        self._flat = flat
        self._dtypes_of = {
            index: {view.dtype, flat.local.get(index, view).dtype}
            for index, view in enumerate(flat.views)
            if flat.layout.slots[index].spec.trainable
        }
        self._mixed = [index for index, dtypes in self._dtypes_of.items() if len(dtypes) > 1 and not flat.is_sharded]

    def require_none(self) -> None:
        """Refuses parameters that were converted since they were laid out.

        Raises:
            EngineError: One is of another dtype than it is computed with or updated in.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for index, dtypes in self._dtypes_of.items():
                if self._flat.all[index].dtype not in dtypes:
                    refuse_conversion(index, self._flat)

    def is_converted(self, index: int, dtype: torch.dtype) -> bool:
        """Whether a parameter is of another dtype than this one, as of a master that it is updated in.

        Raises:
            EngineError: It is of none that it is computed with or updated in.
        """
        with torch._C.DisableTorchFunctionSubclass():
            now = self._flat.all[index].dtype
        if now not in self._dtypes_of.get(index, {now}):
            refuse_conversion(index, self._flat)
        return now != dtype

    def undo(self) -> bool:
        """Parameters that a loop made as wide as they are updated, by `model.float()`, are computed with as ever.

        Returns:
            Whether there were any.

        Raises:
            EngineError: One was edited, too.
        """
        undone = False
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index in self._mixed:
                parameter, view = self._flat.all[index], self._flat.views[index]
                if parameter.dtype == view.dtype:
                    continue
                if not torch.equal(bits_of(parameter), bits_of(view.to(parameter.dtype))):
                    refuse_edit(index, self._flat)
                parameter.data, undone = view, True
        return undone


def refuse_conversion(index: int, flat: FlatParameters) -> NoReturn:
    """Says that a parameter cannot be converted where it is.

    Raises:
        EngineError: Always.
    """
    with torch._C.DisableTorchFunctionSubclass():
        dtype = str(flat.all[index].dtype).removeprefix("torch.")
    raise EngineError(
        f"{flat.layout.slots[index].spec.name} is {dtype} since pl.parallelize: call pl.release(model), change it, "
        "pl.parallelize(model) again, and make a new optimizer; for mixed precision leave the model as it is and set "
        "strategy.precision"
    )
