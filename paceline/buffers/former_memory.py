"""Memory that parameters lay in before they were laid out, or were given since, where a loop has tensors of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.buffers.lent import Lent
from paceline.buffers.memory import bits_of
from paceline.buffers.storage_uses import used_elsewhere
from paceline.core.errors import EngineError
from paceline.tensors.stale_view import become_stale, views_of


class FormerMemory:
    """Tensors that a loop took of parameters before `pl.parallelize`, such as a list of `p.data`: they follow these.

    Under DDP that memory is the parameters' for good. Here these lie elsewhere, so what they become is copied to it.
    Where the loop has kept nothing, and no other process has that memory, nothing is done.

    Attributes:
        lent: Where they lay for a while.
    """

    def __init__(
        self, parameters: Mapping[int, nn.Parameter], names: Sequence[str], contents: Mapping[str, str]
    ) -> None:
        """Keeps what the loop has kept.

        Args:
            parameters: By index, which are about to be given other memory.
            names: Of all parameters.
            contents: What each bucket holds, in words, by its name.
        """
        self._names, self.lent = names, Lent(contents)
        # Each lies there twice meanwhile: as the parameter and as this.
        self._kept = used_elsewhere({index: p.data for index, p in parameters.items()}, 2)
        self._unedited = {index: former.clone() for index, former in self._kept.items()}
        kept = {index: parameters[index] for index in self._kept}
        self._views = list(views_of(kept)) if kept else []

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._kept)

    def move_views(self, parameters: Sequence[nn.Parameter]) -> None:
        """Moves views that have a graph along, as autograd takes a view to be in its parameter's memory.

        Args:
            parameters: All, where they lie now.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, view in self._views:
                now, former = parameters[index].data, self._kept[index]
                if now.dtype == former.dtype == view.dtype and now.stride() == former.stride():
                    offset = now.storage_offset() + view.storage_offset() - former.storage_offset()
                    view.data = now.as_strided(view.shape, view.stride(), offset)
                else:
                    become_stale(view, self._names[index], "before pl.parallelize")
        self._views = []

    def share(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """Parameters were given memory of the loop's by `p.data = ...`, and are about to leave it.

        Args:
            parameters: By index. What they shared memory with before that, they no longer do.
        """
        kept = used_elsewhere({index: p.data for index, p in parameters.items()}, 2)
        for index in parameters:
            self._kept.pop(index, None)
            self._unedited.pop(index, None)
        self._kept |= kept
        self._unedited |= {index: former.clone() for index, former in kept.items()}

    def follow(self, values: Sequence[Tensor]) -> None:
        """Copies what parameters have become to where they were.

        Args:
            values: Of all parameters, whole.
        """
        if not self._kept:
            return
        self._kept = used_elsewhere(self._kept)
        self._unedited = {index: self._unedited[index] for index in self._kept}
        with torch.no_grad():
            for index, former in self._kept.items():
                former.copy_(values[index])
                self._unedited[index].copy_(former)

    def require_unedited(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuses to go on where somebody else wrote to it, which reaches no parameter.

        Args:
            parameters: All. One that was given that memory again has what was written there.

        Raises:
            EngineError: Somebody did.
        """
        self.lent.require_unedited()
        for index, former in self._kept.items():
            if parameters[index].data_ptr() != former.data_ptr() and not torch.equal(
                bits_of(former), bits_of(self._unedited[index])
            ):
                raise EngineError(
                    f"{self._names[index]} was written to by way of a tensor that was taken from it before "
                    "pl.parallelize, by p.data or (from another process) model.share_memory(), or that was given to it "
                    "by p.data = ..., whose memory it has left: take p.data after pl.parallelize, or write to p itself"
                )
