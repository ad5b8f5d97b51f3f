"""Views of parameters that a unit's forward has made and that Python holds somewhere."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.comm.streams import wait_for_others
from paceline.core.errors import EngineError
from paceline.core.uncollected import uncollected

_SECONDS = 1.0
"""For which others of this process are waited for: collectives under way, another thread's collection."""
_PAUSE_SECONDS = 0.001
"""Between two tries while another thread collects."""


class HeldViews:
    """Looks for them in the first forwards of each unit, with a graph and without."""

    def __init__(self) -> None:
        """Has looked at no unit yet."""
        self._seen: set[tuple[str, bool]] = set()

    def begin(self, unit: str) -> None:
        """A unit is about to run: what there is by now, the collector has in another generation than what comes."""
        if self._is_to_see(unit):
            _to_oldest_generation()

    def _is_to_see(self, unit: str) -> bool:
        if (unit, torch.is_grad_enabled()) in self._seen:
            return False
        # What hooks on saved tensors keep of a graph is read in the unit's own backward.
        return not torch._C._autograd._top_saved_tensors_default_hooks(True)

    def require_none(self, unit: str, parameters: Mapping[str, Tensor], known: Callable[[], Iterable[Tensor]]) -> None:
        """Refuses views of a unit's parameters that its forward has put where nobody sees them.

        Args:
            unit: Has run.
            parameters: Its own, by name, gathered.
            known: Gives tensors that may be there: the engine's own, and those for which copies stand.

        Raises:
            EngineError: There is one.
        """
        if not self._is_to_see(unit):
            return
        self._seen.add((unit, torch.is_grad_enabled()))
        with uncollected():
            place = _place_of_one(parameters, known)
            if place is not None:
                # What a stream's thread works with while it carries out a collective looks held, but does not stay.
                wait_for_others(_SECONDS)
                place = _place_of_one(parameters, known)
        if place is not None:
            starts = {parameter.data_ptr(): name for name, parameter in parameters.items()}
            name = starts[max((start for start in starts if start <= place), default=min(starts))]
            raise EngineError(
                f"{name}: {unit} has put a view of it (detach(), data, t(), an index) where paceline does not see "
                "it, such as a list or a global variable. With zero=3 its memory is another unit's next: keep a "
                ".clone(), return the view or leave it on the module, or set strategy.zero to 2 or less or "
                "strategy.accumulation to hold"
            )


def _to_oldest_generation() -> None:
    """Has the collector move all that there is to where it is not looked for.

    While another thread collects, `gc.collect` does nothing; what transports keep of the same memory would be found.
    """
    mark, end = list[None](), time.monotonic() + _SECONDS
    gc.collect(1)
    while any(each is mark for each in gc.get_objects(0) + gc.get_objects(1)) and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        gc.collect(1)


def _place_of_one(parameters: Mapping[str, Tensor], known: Callable[[], Iterable[Tensor]]) -> int | None:
    """Where a view that somebody holds begins; None where there is none. Keeps none itself."""
    seen = {id(tensor) for tensor in known()}
    return next((view.data_ptr() for view in _held(within(parameters)) if id(view) not in seen), None)


def _held(lies_within: Callable[[Tensor], bool]) -> Iterator[Tensor]:
    """Tensors made since `begin` that lie in some memory and that somebody else than a graph holds.

    Those of a version of torch that does not let graphs be told from others are not found.
    """
    baseline = _of_graphs()
    if baseline is not None:
        for tensor, references in _found(lies_within):
            if references > baseline:
                yield tensor


def within(parameters: Mapping[str, Tensor]) -> Callable[[Tensor], bool]:
    """Tells of a tensor whether it lies in the memory that gathered parameters are in for now."""
    memory = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}

    def lies_within(tensor: Any) -> bool:
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            # Such as a nested tensor, which is made of others and has no memory of its own.
            return any(lies_within(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        if tensor.layout == torch.strided:
            return tensor.untyped_storage().data_ptr() in memory
        return tensor.is_sparse and lies_within(tensor._values())

    return lies_within


def is_view(tensor: Any, lies_within: Callable[[Tensor], bool]) -> bool:
    """Whether a tensor is none of the parameters, and lies in some memory."""
    plain = not isinstance(tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) and lies_within(tensor)


def _found(lies_within: Callable[[Tensor], bool]) -> Iterator[tuple[Tensor, int]]:
    """Such tensors, and how many references Python has to each."""
    # Added up, not unpacked into a list that is there before: that would find and keep itself.
    for each in gc.get_objects(0) + gc.get_objects(1):
        if type(each) is Tensor and is_view(each, lies_within):
            # A graph has one to each that it has saved.
            yield each, sys.getrefcount(each) - (each._use_count() > 1)  # type: ignore[attr-defined]


@cache
def _of_graphs() -> int | None:
    """References to a tensor that a graph alone has; None where one that is held is not told from it."""
    if not hasattr(Tensor, "_use_count"):
        return None
    with torch.enable_grad(), torch.inference_mode(False):
        of_graph = _most_references(lambda weight: weight.detach().clone().requires_grad_() @ weight.t())
        held = _most_references(lambda weight: weight.detach())
    return of_graph if 0 < of_graph < held else None


def _most_references(use: Callable[[nn.Parameter], Tensor]) -> int:
    weight = nn.Parameter(torch.ones(2, 2, device="cpu"))
    kept, memory = use(weight), weight.untyped_storage().data_ptr()
    counts = [count for _, count in _found(lambda tensor: tensor.untyped_storage().data_ptr() == memory)]
    del kept
    return max(counts, default=0)
