"""How many bytes of tensors are there at once."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class AliveBytes(TorchDispatchMode):
    """Counts the storages that operations make from when they appear until they are freed.

    Attributes:
        held: Bytes of those that are there.
        peak: The most that it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                # What existed before is not this pass's: parameters, tokens.
                self._known.setdefault(tensor.untyped_storage(), True)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._known:
                storage = tensor.untyped_storage()
                self._known[storage] = True
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, count: int) -> None:
        self.held -= count
