"""What optimizers hold, by the names of a model's parameters: the same for any number of ranks and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.plain import decode, encode, holds_tensors
from paceline.checkpoint.ranges import Ranges
from paceline.checkpoint.reader import Reader
from paceline.comm.control import all_gather_json
from paceline.core.errors import UserError
from paceline.optimizers.elementwise import SHARD
from paceline.optimizers.no_part import OF_ALL
from paceline.optimizers.shard_states import takes_empty_parts
from paceline.tensors.state_shard import plain_state


class ElementState(NamedTuple):
    """One number for each element of a parameter.

    Attributes:
        name: In the checkpoint.
        parameter: Its index.
        tensor: Of this rank's elements; None where it has none.
        dtype: Of all ranks' elements.
    """

    name: str
    parameter: int
    tensor: Tensor | None
    dtype: torch.dtype


class OptimizerStates:
    """The states of some optimizers of one model.

    Attributes:
        optimizers: These.
    """

    def __init__(self, ranges: Ranges, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Looks at what they hold.

        Raises:
            UserError: One holds a parameter that is not the model's.
        """
        self.optimizers = optimizers
        self._ranges, self._parameters = ranges, parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in self._index_of:
                        raise UserError(
                            f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that is "
                            "not the model's: make it a part of the model before pl.parallelize, which also keeps it "
                            "alike on all ranks; where it is of a second model, give each model an optimizer of its "
                            "own, or make one module of both parallel"
                        )
            _require_plain(optimizer)
            ranges.widen(optimizer)

    # ---- to be written

    def of_elements(self) -> Iterator[ElementState]:
        """States with a number for each element, in one order on every rank.

        A collective call where parameters are gathered to be written, whose states every rank must name.
        """
        for number, optimizer in enumerate(self.optimizers):
            held = {
                (index, name): state
                for index, states in self._states(optimizer)
                for name, state in states.items()
                if self._is_of_elements(optimizer, index, name, state)
            }
            gathered: list[list[Any]] = [
                [index, name, str(state.dtype).removeprefix("torch.")]
                for (index, name), state in held.items()
                if self._ranges.is_gathered(index)
            ]
            if any(map(self._ranges.is_gathered, range(len(self._parameters)))):
                for others in all_gather_json(gathered, "pl.save: states of optimizers"):
                    gathered += [other for other in others if other not in gathered]
            for index, name, dtype in sorted(gathered):
                state = held.pop((index, name), None)
                yield self._element_state(number, index, name, state, getattr(torch, dtype))
            for (index, name), state in held.items():
                yield self._element_state(number, index, name, state, state.dtype)

    def _element_state(
        self, number: int, index: int, name: str, state: Tensor | None, dtype: torch.dtype
    ) -> ElementState:
        if state is not None and state.shape != self._ranges.local(index).shape:
            # It was made before the first step, for the whole parameter.
            state = self._ranges.cut(index, state)
        return ElementState(element_name(number, self._ranges.names[index], name), index, state, dtype)

    def values(self, put: Callable[[Tensor], str]) -> list[dict[str, Any]]:
        """The optimizers' groups, and states that are no numbers of elements, encoded."""
        found = []
        for optimizer in self.optimizers:
            what = type(optimizer).__name__
            shared = {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)}
            groups = [
                {
                    **{
                        key: encode(value, put, f"{what}'s {key}")
                        for key, value in group.items()
                        if key not in ("params", SHARD)
                    },
                    "params": [self._ranges.names[self._index_of[id(p)]] for p in group["params"]],
                }
                for group in optimizer.param_groups
            ]
            states: dict[str, dict[str, Any]] = {}
            for index, held in self._states(optimizer):
                if not self._updates(optimizer, index):
                    # Some make states of all parameters when they are built: here no step was counted since.
                    continue
                name = self._ranges.names[index]
                for key, state in held.items():
                    if not isinstance(key, str) or "/" in key:
                        raise UserError(f"{what} holds {key!r} for {name}: name states by text without a slash")
                    if not self._is_of_elements(optimizer, index, key, state):
                        if self._is_cut(optimizer, index) and (shape := _shape_in(state)):
                            raise UserError(
                                f"{what} holds {key} of shape {list(shape)} for a shard of {name}, which other "
                                "numbers of ranks could not use: save at zero=0"
                            )
                        states.setdefault(name, {})[key] = encode(state, put, f"{what}'s {key} of {name}")
            if self._ranges.shards > 1 and not self._ranges.is_whole_in(optimizer) and (shape := _shape_in(shared)):
                raise UserError(
                    f"{what} holds tensors of shape {list(shape)} for no parameter in particular, which other numbers "
                    "of ranks could not use: save at zero=0"
                )
            shared = encode(shared, put, f"{what}'s state")
            found.append({"kind": what, "groups": groups, "states": states, "shared": shared})
        return found

    def _states(self, optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any]]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if states := optimizer.state.get(parameter):
                    yield self._index_of[id(parameter)], {name: plain_state(each) for name, each in states.items()}

    def _is_of_elements(self, optimizer: Optimizer, index: int, name: str, state: Any) -> bool:
        if not isinstance(state, Tensor) or (not state.dim() and name in OF_ALL):
            return False
        if tuple(state.shape) == self._ranges.spec(index).shape:
            return True
        # A statistic of whole parameters may happen to be as long as a shard.
        return self._is_cut(optimizer, index) and state.shape == self._ranges.local(index).shape

    # ---- read

    def require_fit(self, values: Sequence[dict[str, Any]]) -> None:
        """Compares with what was saved.

        Raises:
            UserError: There are other optimizers, or other groups.
        """
        kinds, saved = [type(one).__name__ for one in self.optimizers], [one["kind"] for one in values]
        if kinds != saved:
            raise UserError(
                f"the checkpoint holds the states of {', '.join(saved) or 'no optimizer'}; pl.load was given "
                f"{', '.join(kinds) or 'none'}: give the same optimizers in the same order, or leave them out to load "
                "weights alone"
            )
        for kind, optimizer, one in zip(kinds, self.optimizers, values, strict=True):
            mine = [
                [self._ranges.names[self._index_of[id(p)]] for p in group["params"]] for group in optimizer.param_groups
            ]
            theirs = [group["params"] for group in one["groups"]]
            if list(map(sorted, mine)) != list(map(sorted, theirs)):
                raise UserError(f"{kind}'s parameter groups are not those that were saved: {_difference(theirs, mine)}")
            for index in (self._index_of[id(p)] for group in optimizer.param_groups for p in group["params"]):
                name = self._ranges.names[index]
                for key, state in one["states"].get(name, {}).items():
                    if self._is_cut(optimizer, index) and holds_tensors(state):
                        raise UserError(
                            f"{kind}'s {key} of {name} has no number for each element, of which this rank updates a "
                            "part: load it at zero=0, or leave the optimizer out to load weights alone"
                        )

    def load(self, values: Sequence[dict[str, Any]], reader: Reader) -> None:
        """Gives optimizers their settings and this rank's part of their states.

        Args:
            values: What `values` returned when they were saved.
            reader: Of the checkpoint.
        """
        for number, (optimizer, saved) in enumerate(zip(self.optimizers, values, strict=True)):
            optimizer.state.clear()
            optimizer.state.update(decode(saved.get("shared", {}), reader.read))
            for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
                group.update(decode({key: settings[key] for key in settings if key != "params"}, reader.read))
                self._ranges.mark(optimizer, group)
                for parameter in group["params"]:
                    index = self._index_of[id(parameter)]
                    states = self._of_all(group, index, saved["states"], reader)
                    states |= self._read_elements(number, index, reader, self._ranges.is_whole_in(optimizer))
                    # Torch's optimizers make the states of a parameter when it has none.
                    if states and self._updates(optimizer, index):
                        optimizer.state[parameter] = states
            self._ranges.keep_dtypes(optimizer)

    def _updates(self, optimizer: Optimizer, index: int) -> bool:
        """Whether steps on this rank take in a parameter: it has a part of that, or none is there or asked for."""
        is_empty = not self._ranges.spec(index).numel
        has_part = is_empty or not self._is_cut(optimizer, index) or self._ranges.local(index).numel() > 0
        return has_part or takes_empty_parts(optimizer)

    def _of_all(self, group: dict[str, Any], index: int, saved: dict[str, Any], reader: Reader) -> dict[str, Any]:
        """States of a parameter that are no numbers of its elements."""
        found: dict[str, Any] = decode(saved.get(self._ranges.names[index], {}), reader.read)
        device = self._ranges.local(index).device
        for key, state in found.items():
            # As torch has it: the host reads the number of steps, unless the update runs on the device alone.
            if isinstance(state, Tensor) and (key != "step" or group.get("capturable") or group.get("fused")):
                found[key] = state.to(device)
        return found

    def _is_cut(self, optimizer: Optimizer, index: int) -> bool:
        """Whether this rank holds an optimizer's states of its shard of a parameter, and none of the others'."""
        return self._ranges.is_cut(index) and not self._ranges.is_whole_in(optimizer)

    def _read_elements(self, number: int, index: int, reader: Reader, whole: bool) -> dict[str, Tensor]:
        found, parameter = {}, element_name(number, self._ranges.names[index], "")
        local, before = self._ranges.local(index), reader.dtype(f"model/{self._ranges.names[index]}")
        for name in reader.under(parameter):
            # As torch has it: what had the parameter's dtype has that of the parameter that it is loaded for.
            dtype = local.dtype if reader.dtype(name) == before else reader.dtype(name)
            read_into = partial(reader.read_into, name)
            if whole:
                state = self._ranges.whole(index, dtype, read_into)
            else:
                state = torch.empty_like(local, dtype=dtype)
                self._ranges.fill(index, state, read_into)
            found[name.removeprefix(parameter)] = state
        return found


def element_name(optimizer: int, parameter: str, state: str) -> str:
    """What a state is called in a checkpoint."""
    return f"optimizer {optimizer}/{parameter}/{state}"


def _require_plain(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose `state_dict` is more than, or not, what it holds.

    Raises:
        UserError: It is such a one.
    """
    kind = type(optimizer)
    # One that wraps another may never have called `Optimizer.__init__`, which makes these.
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    if kind.state_dict is Optimizer.state_dict and not any(hooks):
        return
    given = optimizer.state_dict()
    held = {id(state) for state in optimizer.state.values()}
    if {*given} != {"state", "param_groups"} or any(id(state) not in held for state in given["state"].values()):
        more = ", ".join(sorted(map(str, {*given} - {"state", "param_groups"}))) or "other states"
        raise UserError(
            f"{kind.__name__} has a state_dict of its own, with {more}, which would be lost: keep that in the "
            "optimizer's state or param_groups; or leave the optimizer out, and give its state_dict() as extra"
        )


def _shape_in(state: Any) -> tuple[int, ...]:
    """The shape of the first tensor in a value that has more than one element by its shape; () without any."""
    if isinstance(state, Tensor):
        return tuple(state.shape)
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return next(filter(None, map(_shape_in, inner)), ())


def _difference(saved: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> str:
    if len(saved) != len(mine):
        return f"{len(saved)} were saved, there are {len(mine)}"
    for number, (theirs, ours) in enumerate(zip(saved, mine, strict=True)):
        missing, new = sorted({*theirs} - {*ours}), sorted({*ours} - {*theirs})
        if missing or new:
            return f"group {number} lacks {missing[:3]} and has {new[:3]} instead"
    return "they hold the same in another way"
