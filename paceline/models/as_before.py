"""A forward that is computed again from what it was given and read the first time, though that has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes as _unseen
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import EngineError
from paceline.models.drawn_from import Drawn, set_states, states
from paceline.models.growing import copied, may_grow
from paceline.models.plain_values import SMALL, Copies, is_alike, is_small, replace
from paceline.models.within_reach import PLAIN, reached

Place = tuple[nn.Module, str]
_Version = tuple[type, int]
"""A tensor's class and version."""

# `_unseen`: what is done in it is no part of the forward, whose ops a selective checkpoint counts in modes of its own,
# and takes for others if there are more the second time.


class ChangedBuffers:
    """What a module's forwards may change of its buffers: statistics of norms, vectors of a power iteration.

    Large ones, such as masks and tables of positions, are left out once a forward has left them alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._idle: set[tuple[Place, bool]] = set()
        """Large ones that forwards leave alone, where their submodule is training, or is not."""

    def before(self, modules: Iterable[nn.Module]) -> dict[Place, Tensor]:
        """Copies of what a forward that may run these modules may change."""
        return _copies(
            {
                place: each
                for place, each in _buffers_of(modules).items()
                if each.numel() <= SMALL or (place, place[0].training) not in self._idle
            }
        )

    def watch(self, forward: Callable[[], Any], before: dict[Place, Tensor], modules: Sequence[nn.Module]) -> Any:
        """Runs a forward that `before` was made for, and drops the large copies from it that were not needed.

        Raises:
            EngineError: It wrote to a large buffer that forwards had left alone, of which there is no copy.
        """
        found = _buffers_of(modules)
        if not found:
            return forward()
        versions = {place: each._version for place, each in found.items()}
        modes = {owner: owner.training for owner, _ in found}
        answer = forward()
        now = _buffers_of(modules)
        for place, each in found.items():
            is_written, is_there = each._version != versions[place], now.get(place) is each
            if place in before:
                # Kernels of batch norm write to statistics without a new version.
                with _unseen():
                    is_kept = each.numel() <= SMALL or is_written or not is_there or not each.equal(before[place])
                if not is_kept:
                    del before[place]
                    self._idle.add((place, modes[place[0]]))
            elif is_written:
                raise EngineError(
                    f"{type(self.module).__name__}: its forward wrote to the buffer {place[1]}, which the first "
                    "forward had not, so that recompute has no copy of what it was: leave this block out of recompute"
                )
            elif not is_there:
                before[place] = each
        self._idle = {(place, mode) for place, mode in self._idle if place in found}
        return answer

    def require_unwritten(self, versions: Sequence[_Version], tensors: Sequence[Tensor]) -> None:
        """Refuses a block some of whose inputs are not what they were, so that it cannot be computed again.

        Args:
            versions: Of `tensors`, before.
            tensors: Its inputs.

        Raises:
            EngineError: One was written to.
        """
        # A parameter that has become whole is of another class, and of another version without being written to.
        pairs = zip(_versions(tensors), versions, strict=True)
        if any(kind is was and version != before for (kind, version), (was, before) in pairs):
            raise EngineError(
                f"{type(self.module).__name__}: a tensor that its forward is given was written to in place (as by "
                "x.add_(...)), so that recompute, which keeps no copy of it, would compute with another one: write to "
                "a copy (x = x + ...), or set strategy.recompute to none"
            )


def _buffers_of(modules: Iterable[nn.Module]) -> dict[Place, Tensor]:
    return {(owner, name): each for owner in modules for name, each in owner._buffers.items() if each is not None}


def _copies(tensors: dict[Place, Tensor]) -> dict[Place, Tensor]:
    """A copy of each; one that lies in several places is one."""
    copies = {id(each): each.detach().clone() for each in tensors.values()}
    return {place: copies[id(each)] for place, each in tensors.items()}


_MACHINERY = frozenset(vars(nn.Module())) - {"training", "_parameters", "_modules"}
"""What torch keeps in a module, of which buffers have a way of their own, and hooks count where there are any."""
_HOOKS = frozenset(name for name in _MACHINERY if name.startswith(("_forward_", "_backward_")))


class _Part:
    """A module as a forward finds it: attributes, hooks, parts, whether it trains, and parameters, its own or lent.

    `torch.func.functional_call` lends some for one forward, for which others may have hooks, and who evaluates between
    forward and backward switches modes. Of plain values that can change and of small tensors there are copies; large
    tensors are not kept alive.
    """

    def __init__(self, module: nn.Module, copies: Copies) -> None:
        self.module = module
        own = {n: value for n, value in vars(module).items() if n not in _MACHINERY or (n in _HOOKS and value)}
        self.tensors = {name for name, value in own.items() if isinstance(value, Tensor) and not is_small(value)}
        self.own = {name: copies.of(value) for name, value in own.items() if name not in self.tensors}
        small = {name: value for name, value in self.own.items() if isinstance(value, Tensor)}
        self.copies = {name: (value._version, value.detach().clone()) for name, value in small.items()}

    def is_so(self) -> bool:
        """Whether it is as it was."""
        now = {name: value for name, value in vars(self.module).items() if self._counts(name, value)}
        if now.keys() != self.own.keys() or not all(is_alike(now[name], value) for name, value in self.own.items()):
            return False
        return all(now[name]._version == version for name, (version, _) in self.copies.items())

    def put(self, copies: Copies) -> Callable[[], None]:
        """Makes it what it was; returns what undoes that."""
        now, was = vars(self.module), dict(vars(self.module))
        kept = {name: each for name, each in was.items() if name in _HOOKS or not self._counts(name, each)}
        written = {name: c.clone() for name, (v, c) in self.copies.items() if self.own[name]._version != v}
        own = {name: copies.of(value) for name, value in self.own.items() if name not in _HOOKS}
        replace(now, {**kept, **own, **written})
        # In the dictionaries that there are, as handles refer to these.
        hooks = [(was[name], dict(was[name])) for name in _HOOKS if name in was]
        for name in _HOOKS.intersection(was):
            replace(was[name], self.own.get(name, {}))

        def undo() -> None:
            replace(now, was)
            for places, contents in hooks:
                replace(places, contents)

        return undo

    def _counts(self, name: str, value: Any) -> bool:
        if name in _HOOKS:
            return bool(value) or name in self.own
        left_out = name in _MACHINERY or name in self.tensors
        return not left_out and (name in self.own or not isinstance(value, Tensor) or is_small(value))


def _referred_by(parts: Iterable[_Part]) -> Iterator[Any]:
    """What their attributes refer to, but for what most hold and what is known."""
    for part in parts:
        for name, value in part.own.items():
            if type(value) not in PLAIN and name not in ("_parameters", "_modules"):
                yield value


def _within_reach(module: nn.Module, given: Sequence[Any], copies: Copies) -> tuple[list[_Part], list[Drawn]]:
    """All that a module's forward may run, but for what the module is a part of, and what it may draw from.

    Raises:
        EngineError: It may take from an iterator.
    """
    for each in given:
        # Objects among them keep what they are made of.
        copies.of(each)
    found = {each: _Part(each, copies) for each in module.modules()}
    generators = dict[int, Drawn]()
    held = [*given, *_referred_by(found.values())]
    while held:
        for other in reached(held.pop()):
            if isinstance(other, Iterator):
                raise EngineError(
                    f"{type(module).__name__}: it holds or is given an iterator ({type(other).__name__}), from which "
                    "its forward may take, and which recompute cannot put back: hold a list and a position in it, or "
                    "leave this block out of recompute"
                )
            if not isinstance(other, nn.Module):
                generators[id(other)] = other
            elif other not in found and module not in other.modules():
                more = {each: _Part(each, copies) for each in other.modules() if each not in found}
                held += _referred_by(more.values())
                found.update(more)
    return list(found.values()), list(generators.values())


class AsBefore:
    """One forward of a module: computed again, it finds what it reads as it was, and leaves it as it is.

    Caches, lists and dictionaries that it is given; buffers and attributes of its submodules, and of other modules that
    it is given or refers to, and which of their parameters are trained.
    """

    def __init__(
        self, forward: Callable[..., Any], buffers: ChangedBuffers, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._forward, self._buffers = forward, buffers
        self._given = [copied(each) if may_grow(each) else None for each in (*args, *kwargs.values())]
        self._copies = Copies()
        self._parts, generators = _within_reach(buffers.module, (*args, *kwargs.values()), self._copies)
        self._random = states(generators)
        self._modules = [part.module for part in self._parts]
        self._trained = [
            (p, p.requires_grad) for each in self._modules for p in each._parameters.values() if p is not None
        ]
        self._before = buffers.before(self._modules)
        self._written: set[int] = set()
        """Places of those to which the first forward wrote."""
        self._is_first = True
        self._versions: list[_Version] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, the first time and each time again.

        Raises:
            EngineError: What it is given was written to, of which there is no copy.
        """
        if self._is_first:
            self._is_first = False
            tensors = _tensors((args, kwargs))
            versions, hooks = _versions(tensors), RemovableHandle.next_id
            answer = self._buffers.watch(lambda: self._forward(*args, **kwargs), self._before, self._modules)
            self._buffers.require_unwritten(versions, tensors)
            self._versions = _versions(self._referred(args, kwargs))
            with _unseen():
                # A hook that it makes and takes away would stay: a checkpoint ends it as soon as it has all it needs.
                makes_hooks = RemovableHandle.next_id != hooks
                self._written = {i for i, part in enumerate(self._parts) if makes_hooks or not part.is_so()}
            return answer
        self._buffers.require_unwritten(self._versions, self._referred(args, kwargs))
        given = [
            each if before is None else copied(before)
            for each, before in zip((*args, *kwargs.values()), self._given, strict=True)
        ]
        random = states(generator for generator, _ in self._random)
        # As loops do that freeze a discriminator for a generator's forward alone.
        frozen = [(p, trains) for p, trains in self._trained if p.requires_grad != trains]
        after = {(owner, name): owner._buffers.get(name) for owner, name in self._before}
        with _unseen():
            twins = Copies()
            undo = [
                part.put(twins) for index, part in enumerate(self._parts) if index in self._written or not part.is_so()
            ]
            undo.append(self._copies.put())
            copies = _copies(self._before)
        try:
            for (owner, name), buffer in copies.items():
                owner._buffers[name] = buffer
            for parameter, trains in frozen:
                parameter.requires_grad_(trains)
            set_states(self._random)
            return self._forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        finally:
            # However it ends: checkpoint stops as soon as it has what it needs.
            for (owner, name), was in after.items():
                owner._buffers[name] = was
            for parameter, trains in frozen:
                parameter.requires_grad_(not trains)
            set_states(random)
            for put_back in undo:
                put_back()

    def _referred(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that are not arguments themselves, whose versions autograd compares, but named or inside one."""
        given = [
            each if before is None else before
            for each, before in zip((*args, *kwargs.values()), self._given, strict=True)
        ]
        return _tensors((*(each for each in given[: len(args)] if not isinstance(each, Tensor)), *given[len(args) :]))


def _versions(tensors: Sequence[Tensor]) -> list[_Version]:
    return [(type(each), each._version) for each in tensors]


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in nested values whose versions tell when they are written to."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and not each.is_inference()]
