"""Watches a forward and a backward, operator by operator: what each unit computes, how long its results live."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.plan.counting import operation, uncounted
from paceline.plan.likely_values import likely, note, spoken
from paceline.plan.shape_rules import called
from paceline.plan.work import Operation

ATTENTION = "_scaled_dot_product_"
"""How the names of fused attention's operators begin."""

_MOST_ASKED = 1000
"""Conditions that depend on values in one unit."""


class ObservedPass(TorchDispatchMode):
    """Counts operations and follows every storage while a model runs, on tensors with or without memory.

    Backward operations belong to the unit whose forward made the node of the graph that autograd executes.

    Attributes:
        forward: Operations of each unit's forward pass.
        backward: Operations of each unit's backward pass.
        again: How many of each unit's forward operations come before the last tensor that autograd keeps: what torch's
            checkpoint runs once more (its early stop).
        operators: How many ran.
        failed: The operator that raised, with its unit.
        guessed: Operators whose results depend on values, which were taken to be what is likely.
        asked: Whether a condition was among these.
        unknown: Operators that look as if they multiplied matrices, but whose cost is not known.
        changed: Whether something wrote to memory that was there before the current unit began.
        paused: Whether operations are not counted, as they stand in for others.
    """

    def __init__(self, permanent: Iterable[Tensor], shared: Iterable[Tensor] = (), holds: bool = True) -> None:
        """Sees nothing yet.

        Args:
            permanent: Tensors that are not activations: parameters, buffers and the model's inputs.
            shared: Those parameters that are used more than once, whose gradients come in parts.
            holds: As for `likely`.
        """
        super().__init__()
        self._holds, self._conditions, self.asked = holds, 0, False
        self.forward: dict[str, list[Operation]] = defaultdict(list)
        self.backward: dict[str, list[Operation]] = defaultdict(list)
        self.again: dict[str, int] = defaultdict(int)
        self.operators = 0
        self.failed: tuple[str, str] | None = None
        self.guessed: set[str] = set()
        self.unknown: set[str] = set()
        self.changed = self.paused = False
        self.phase, self.unit = "forward", ""
        self.order: list[str] = []
        self._entered: list[tuple[int, str]] = [(0, "")]
        self._first_of_unit = 0
        self._permanent = {_key(each) for each in permanent}
        self._shared = {shape for each in shared for shape in (tuple(each.shape), tuple(each.shape)[::-1])}
        self._serials: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._sizes: list[int] = []
        self._columns: list[int] = []
        self._makers: list[str] = []
        self._savers: dict[int, str] = {}
        self._changes: list[tuple[str, str, int, int]] = []
        self._gradients: set[int] = set()
        self._parts: set[int] = set()
        self._alive_between: set[int] = set()
        self._of_forward = 0
        self._inputs: dict[str, set[int]] = defaultdict(set)
        self._attention: dict[str, set[int]] = defaultdict(set)

    # ---- operators

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if self.phase == "backward":
            self._follow_autograd()
        try:
            result = likely(func, args, kwargs, self._holds)
            if result is NotImplemented:
                result = called(func, args, kwargs)
            else:
                self.guessed.add(spoken(func))
                self._end_endless(result)
            note(func, args, result)
        except Exception:
            if self.failed is None:
                self.failed = spoken(func), self.unit
            raise
        self.operators += 1
        self._see(func, args, result)
        if not self.paused:
            counted = operation(func, args, kwargs, result)
            if uncounted(func, counted):
                self.unknown.add(func._schema.name.partition("::")[2])
            if counted is not None:
                if self.phase == "backward" and torch.is_grad_enabled():
                    # Autograd's own nodes run without gradients: this is a forward that the model runs again by itself.
                    counted = replace(counted, needed=0.0)
                (self.forward if self.phase == "forward" else self.backward)[self.unit].append(counted)
        return result

    def _end_endless(self, result: Any) -> None:
        self.asked |= type(result) is bool
        self._conditions += type(result) is bool
        if self._conditions > _MOST_ASKED:
            raise RuntimeError(f"{_MOST_ASKED:,} conditions of it depend on values, as of a loop that ends by one")

    def _follow_autograd(self) -> None:
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else None
        # What accumulates gradients has no number of its own: it belongs to the node before.
        if number is not None and number < 2**63:
            self.unit = self._entered[bisect_right(self._entered, number, key=lambda each: each[0]) - 1][1]

    def _see(self, func: Any, args: Sequence[Any], result: Any) -> None:
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        for tensor in outputs:
            serial = self._register(tensor)
            made = serial is not None and self.phase == "backward" and serial >= self._of_forward
            if serial is not None and made and self._is_part(func, args, tensor):
                self._gradients.add(serial)
                self._parts.add(serial)
            if serial is not None and func._schema.name.startswith(f"aten::{ATTENTION}") and self.phase == "forward":
                self._attention[self.unit].add(serial)
        if func._schema.is_mutable and self.phase == "forward":
            written = next((each for each in args if isinstance(each, Tensor)), None)
            if written is not None and self._serials.get(_key(written), -1) < self._first_of_unit:
                self.changed = True

    def _is_part(self, func: Any, args: Sequence[Any], result: Tensor) -> bool:
        """Whether what backward makes is a share of a shared parameter's gradient, or a sum of such shares.

        Activations may be of a parameter's shape, too, as logits of as many tokens as the model is wide: these come
        of others of their size, or of a product with a parameter.
        """
        shape, name = tuple(result.shape), func._schema.name.partition("::")[2]
        if shape not in self._shared:
            return False
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if "mm" in name:
            return all(_key(each) not in self._permanent for each in tensors)
        if name == "embedding_dense_backward":
            return True
        alike = (each for each in tensors if each.numel() == result.numel())
        return all(self._serials.get(_key(each)) in self._parts for each in alike)

    # ---- storages

    def _register(self, tensor: Tensor) -> int | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._permanent:
            return None
        if key in self._serials:
            return self._serials[key]
        serial = len(self._sizes)
        self._serials[key] = serial
        self._sizes.append(storage.nbytes())
        self._columns.append(tensor.shape[-1] if tensor.dim() > 1 else 0)
        self._makers.append(self.unit)
        self._changes.append((self.phase, self.unit, serial, storage.nbytes()))
        self._watches[serial] = weakref.ref(storage, lambda _: self._freed(key, serial))
        return serial

    def _freed(self, key: int, serial: int) -> None:
        del self._serials[key], self._watches[serial]
        self._changes.append((self.phase, self.unit, serial, -self._sizes[serial]))

    def saved(self, tensor: Tensor) -> Tensor:
        """Notes that autograd keeps a tensor; for `torch.autograd.graph.saved_tensors_hooks`."""
        serial = self._register(tensor)
        if self.phase == "forward":
            self.again[self.unit] = len(self.forward[self.unit])
        if serial is not None and self.phase == "forward":
            self._savers.setdefault(serial, self.unit)
        return tensor

    def is_told_first(self) -> bool:
        """Whether `saved` is told of what autograd keeps now, and not another's hooks, such as a checkpoint's."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] == self.saved

    def is_gradient(self, parameter: Tensor) -> None:
        """Notes that a parameter's gradient is complete."""
        if parameter.grad is not None and (serial := self._register(parameter.grad)) is not None:
            self._gradients.add(serial)

    # ---- units

    @contextmanager
    def inside(self, unit: str, inputs: Iterable[Tensor]) -> Iterator[None]:
        """While a unit's forward runs."""
        self.enter(unit, inputs)
        try:
            yield
        finally:
            self.leave()

    def enter(self, unit: str, inputs: Iterable[Tensor]) -> None:
        """A unit's forward begins, in the forward pass."""
        self.unit, self._conditions = unit, 0
        self._entered.append((torch._C._autograd._get_sequence_nr(), unit))
        self._first_of_unit = len(self._sizes)
        self.changed = False
        if unit not in self.order:
            self.order.append(unit)
        for tensor in inputs:
            if (serial := self._register(tensor)) is not None:
                self._inputs[unit].add(serial)

    def leave(self) -> None:
        """A unit's forward is over."""
        self.unit = ""
        self._entered.append((torch._C._autograd._get_sequence_nr(), ""))

    def turn(self) -> None:
        """The forward pass is over."""
        self.phase, self._alive_between, self._of_forward = "backward", set(self._watches), len(self._sizes)

    # ---- what units keep

    def kept(self) -> dict[str, int]:
        """Bytes that each unit keeps for backward: what is left of forward, by who saves it, else by who made it."""
        return self._sums(self._kept_by(self._alive_between))

    def logits(self, vocabulary: int) -> dict[str, int]:
        """Bytes of what each unit keeps that are logits, or as wide: rows may be padded to multiples of 8 elements."""
        widths = range(vocabulary, vocabulary + 8)
        return self._sums(self._kept_by(each for each in self._alive_between if self._columns[each] in widths))

    def _kept_by(self, serials: Iterable[int]) -> dict[int, str]:
        return {serial: self._savers.get(serial, self._makers[serial]) for serial in serials}

    def kept_where_recomputed(self, attention: bool) -> dict[str, int]:
        """Bytes that would be left if each unit kept its inputs alone, or these and its attention's results."""
        owners: dict[int, str] = {}
        for unit in self.order:
            for serial in (*self._inputs[unit], *(self._attention[unit] if attention else ())):
                owners.setdefault(serial, unit)
        return self._sums(owners)

    def held(self) -> dict[tuple[str, str], list[int]]:
        """Bytes that are there after each change, gradients of parameters apart, by phase and unit."""
        alive, found = 0, defaultdict[tuple[str, str], list[int]](list)
        for phase, unit, serial, change in self._changes:
            if serial not in self._gradients:
                # A unit that allocates nothing has at least what is there as it begins.
                alive += change
                found[phase, unit].append(alive)
        return found

    def held_with_gradients(self) -> dict[str, list[int]]:
        """Bytes that are there after each change of a unit's backward, with its own parameters' gradients as they come.

        Gradients of parameters that several units use are apart.
        """
        alive, own = 0, defaultdict[str, int](int)
        found = defaultdict[str, list[int]](list)
        for phase, unit, serial, change in self._changes:
            if serial in self._gradients:
                own[unit] += 0 if serial in self._parts else change
            else:
                alive += change
            if phase == "backward":
                found[unit].append(alive + own[unit])
        return found

    def _sums(self, owners: Mapping[int, str]) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for serial, unit in owners.items():
            found[unit] += self._sizes[serial]
        return found


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
