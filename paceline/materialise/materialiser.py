"""Models on the meta device: made in turns, unit by unit, of which each rank keeps what its stage says.

In a turn the modules of one unit get memory on the device and values, rank 0's go to every rank, the engine takes its
shards, and the memory is freed. So a rank never holds more than its shards, one unit, and the parameters of no unit
(tied ones) that modules of a later turn hold too.

The values are those of `model.to_empty(device=...)` and then `model.apply(init)` on rank 0, as far as `init` writes to
nothing but the module that it is given and what is inside it. PyTorch's FSDP materialises each wrapped module alike
(`param_init_fn`); DeepSpeed's `zero.Init` cuts parameters while the constructor runs, which must then be inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.buffers.memory import placeholder
from paceline.comm.control import all_gather_json
from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.materialise.fresh_memory import Scratch, fresh_like, lacks_values, leave_meta
from paceline.materialise.stored_weights import StoredWeights
from paceline.models.units import named_parameters

Init = Callable[[nn.Module], Any]
"""Writes values to the parameters and buffers of a module."""


def materialiser(
    module: nn.Module, units: Iterable[nn.Module], world: World, init: Init | None, weights: str | Path | None
) -> Materialiser | None:
    """What makes a model that is on the meta device, in part or on some rank; None where none is. A collective call.

    Raises:
        UserError: `init` or `weights` are given for a model that has values, or `weights` on some ranks only, or they
            do not fit the model.
    """
    on_meta = any(tensor.is_meta for part in module.modules() for _, tensor in _own(part))
    ranks = all_gather_json([on_meta, weights is not None], "models on the meta device")
    if len({stored for _, stored in ranks}) > 1:
        raise UserError("parallelize: weights are given on some ranks only; give every rank the same arguments")
    made = any(meta for meta, _ in ranks)
    if (not made and init is not None) or (weights is not None and not ranks[0][0]):
        raise UserError(
            "parallelize: init and weights are for models on the meta device, but this one has values (on rank 0, "
            "whose count); leave them out, or make the model under `with torch.device('meta'):`"
        )
    receives = world.rank > 0 and not ranks[0][0]
    return Materialiser(module, units, world, init, weights, receives) if made else None


class Materialiser:
    """Makes one model, in turns."""

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module],
        world: World,
        init: Init | None,
        weights: str | Path | None,
        receives: bool,
    ) -> None:
        """Arranges the turns; nothing is allocated. A collective call where there are weights.

        Args:
            module: The model.
            units: Its units.
            world: The job.
            init: Initialises a module; None: its own `reset_parameters` does.
            weights: Where they are, on rank 0.
            receives: Whether all values come from rank 0, so that nothing has to be initialised here.

        Raises:
            UserError: See `materialiser`.
        """
        self._init, self._device, self._units, self._receives = init, world.device, set(units), receives
        self._path_of = {part: name for name, part in module.named_modules()}
        self._stored_names = _stored_names(module)
        self._is_stored = weights is not None
        self._stored = self._open(module, weights, world.rank) if weights is not None else None
        self._wanting = {part for part in module.modules() if any(self._wants(part, *own) for own in _own(part))}
        """Modules with something of their own that `init` gives its values."""
        self._turns: list[list[nn.Module]] = []
        self._arrange(module, set())
        self._span: dict[int, tuple[int, int]] = {}
        """The first and the last turn with a module that holds a parameter, by its `id()`."""
        for turn, parts in enumerate(self._turns):
            for parameter in _held(parts).values():
                self._span[id(parameter)] = self._span.get(id(parameter), (turn, turn))[0], turn
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers as they were and what took their place, by the former's `id()`."""
        self._fresh: dict[int, int] = {}
        """The version that a parameter's or buffer's new memory began with, by its `id()`."""
        self._done: list[tuple[str, nn.Parameter, int]] = []

    def _open(self, module: nn.Module, path: str | Path, rank: int) -> StoredWeights | None:
        found, problem = None, ""
        if rank == 0:
            tensors = dict((*named_parameters(module, remove_duplicate=False), *_persistent_buffers(module)))
            wanted = {names[0]: names for names in self._stored_names.values()}
            try:
                found = StoredWeights(path)
                found.require_fit([(names, tuple(tensors[name].shape)) for name, names in wanted.items()])
            except UserError as error:
                problem = str(error)
        (problem, *_) = all_gather_json(problem, "weights")
        if problem:
            raise UserError(problem)
        return found

    def _wants(self, part: nn.Module, name: str, tensor: Tensor) -> bool:
        given = self._receives or (self._is_stored and self._full(part, name) in self._stored_names)
        return tensor.is_meta and not given

    def _full(self, part: nn.Module, name: str) -> str:
        path = self._path_of[part]
        return f"{path}.{name}" if path else name

    def _arrange(self, part: nn.Module, seen: set[nn.Module]) -> None:
        """Makes a turn of each unit, of what is outside of units, and of what is around units and has values itself."""
        if part in self._units or self._units.isdisjoint(part.modules()):
            turn = [inner for inner in dict.fromkeys(_children_first(part)) if inner not in seen]
            seen.update(turn)
            self._turns += [turn] if turn else []
            return
        seen.add(part)
        for child in part.children():
            if child not in seen:
                self._arrange(child, seen)
        if any(True for _ in _own(part)):
            self._turns.append([part])
        elif self._init is None and _reset_of(part) is not None and not self._wanting.isdisjoint(part.modules()):
            raise UserError(
                f"parallelize: reset_parameters of {self._say(part)} is about several units, of which one is there at "
                "a time; give init=, a function that is called with one module after another, as by model.apply(init)"
            )

    def _say(self, part: nn.Module) -> str:
        return f"{self._path_of[part] or 'the model'} ({type(part).__name__})"

    # ---- the turns

    def turns(self, send: Callable[[Iterable[Tensor]], None]) -> Iterator[list[nn.Parameter]]:
        """Yields the parameters of one turn after another, whole until the next is asked for. A collective call.

        Args:
            send: Gives every rank rank 0's tensors.

        Raises:
            UserError: `init` left something without values, or wrote to what is not there; or weights cannot be read.
        """
        scratch = Scratch(max(map(self._lent, range(len(self._turns))), default=0), self._device)
        for number, parts in enumerate(self._turns):
            scratch.clear()
            for part in parts:
                self._allocate(part, scratch)
            before = _held(parts)
            for part in parts:
                if not self._wanting.isdisjoint(part.modules()):
                    self._initialise(part)
            self._require_same(before, _held(parts))
            for part in parts:
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        part._buffers[name] = self._completed(self._full(part, name), buffer)
            done = {id(p): (self._full(*place), p) for place, p in before.items() if self._span[id(p)][1] == number}
            for name, parameter in done.values():
                self._completed(name, parameter)
            send([parameter.data for _, parameter in done.values()])
            yield [parameter for _, parameter in done.values()]
            for name, parameter in done.values():
                parameter.data = placeholder(parameter.data)
                self._done.append((name, parameter, parameter._version))
        self._require_untouched()

    def _lent(self, turn: int) -> int:
        """Bytes of what has memory in one turn alone."""
        held = {id(p): p for p in _held(self._turns[turn]).values() if self._span[id(p)] == (turn, turn)}
        return Scratch.size(p for p in held.values() if p.is_meta)

    def _allocate(self, part: nn.Module, scratch: Scratch) -> None:
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                first, last = self._span[id(parameter)]
                memory = scratch.like(parameter) if first == last else fresh_like(parameter, self._device)
                leave_meta(self._full(part, name), parameter, memory)
                self._fresh[id(parameter)] = parameter._version
            elif parameter is not None:
                parameter.data = parameter.data.to(self._device)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                if id(buffer) not in self._buffers:
                    self._buffers[id(buffer)] = buffer, self._real_buffer(buffer)
                part._buffers[name] = self._buffers[id(buffer)][1]

    def _real_buffer(self, buffer: Tensor) -> Tensor:
        if not buffer.is_meta:
            return buffer.to(self._device)
        real = fresh_like(buffer, self._device)
        self._fresh[id(real)] = real._version
        return real

    def _initialise(self, part: nn.Module) -> None:
        try:
            if self._init is not None:
                self._init(part)
            elif (reset := _reset_of(part)) is not None:
                reset()
            elif part in self._wanting:
                names = ", ".join(name for name, tensor in _own(part) if id(tensor) in self._fresh)
                raise UserError(
                    f"parallelize: nothing gives {self._say(part)} its {names}, as it has no reset_parameters(). "
                    "Give init=, a function of a module that writes to its parameters and buffers, weights=, or the "
                    "class a reset_parameters(); buffers may also stay off the meta device"
                )
        except Exception as error:
            error.add_note(f"while {self._say(part)} was initialised: one unit is there at a time, others are not")
            raise

    def _completed(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter or buffer on the device, with its values where these are not rank 0's to give."""
        is_stored = self._is_stored and name in self._stored_names
        if not is_stored and not self._receives:
            version = self._fresh.get(id(tensor))
            if tensor.is_meta or (version is not None and lacks_values(tensor, version)):
                raise UserError(
                    f"parallelize: init left {name} without values, in part or whole, or with NaN in it: write to all "
                    "of it, as with module.weight.copy_(...), or keep a buffer off the meta device"
                )
        tensor = tensor.to(self._device)
        if is_stored and self._stored is not None:
            self._stored.read_into(tensor.data, self._stored_names[name])
        return tensor

    def _require_same(self, before: _Held, after: _Held) -> None:
        for place in before.keys() | after.keys():
            if before.get(place) is not after.get(place):
                raise UserError(
                    f"parallelize: init put another parameter in the place of {self._full(*place)}: write to the one "
                    "that is there, as with module.weight.copy_(...)"
                )

    def _require_untouched(self) -> None:
        for name, parameter, version in self._done:
            value = parameter.data.as_strided((), ())
            if parameter._version != version or (value.is_floating_point() and not value.float().isnan()):
                raise UserError(
                    f"parallelize: init wrote to {name} when its unit was done: write only to the module that init is "
                    "given, and to what is inside it"
                )


_Held = dict[tuple[nn.Module, str], nn.Parameter]


def _held(parts: Iterable[nn.Module]) -> _Held:
    return {(part, name): p for part in parts for name, p in part._parameters.items() if p is not None}


def _own(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _stored_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of the tensor that has a name in `state_dict`."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*named_parameters(module, remove_duplicate=False), *_persistent_buffers(module)):
        names.setdefault(id(tensor), []).append(name)
    return {name: several for several in names.values() for name in several}


def _children_first(part: nn.Module) -> Iterator[nn.Module]:
    for child in part.children():
        yield from _children_first(child)
    yield part


def _reset_of(part: nn.Module) -> Callable[[], Any] | None:
    """What a module initialises itself by; some of torch's own call it by another name."""
    found = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    return found if callable(found) else None
